"""Forecasts of the memory that training takes on each rank, for each strategy, and the choice of one."""
