"""What a piece of work does on a share: tables and predictors."""
