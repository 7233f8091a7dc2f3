"""Reports: diagnosis, plan, forecast, recent runs, and the state of the sidebar."""
