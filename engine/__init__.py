"""The step: schedule, execute, commit, and the drivers around it."""
