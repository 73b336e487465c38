"""Models on devices."""
