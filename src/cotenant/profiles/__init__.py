"""Tables and predictors of the speed of models and jobs on a share of a GPU."""
