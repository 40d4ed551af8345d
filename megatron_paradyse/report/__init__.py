"""A trace of a training as one HTML page with figures. No torch."""
