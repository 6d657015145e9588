"""Measurements. Figures and what they taught are in NOTES.md."""
