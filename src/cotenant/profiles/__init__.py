"""Tables and predictors of the speed of work on a share of a GPU."""
