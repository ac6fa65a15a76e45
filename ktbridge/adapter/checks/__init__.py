"""Checks of one adapter directory or several, one file per subject; findings, never exceptions."""
