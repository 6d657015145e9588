"""Measurements. NOTES.md has the figures and the conclusions."""
