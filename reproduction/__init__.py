"""The paper's results: run for real, and simulated at its scale. scripts/ calls these modules."""
