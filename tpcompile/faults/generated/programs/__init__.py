"""Programs with marked places; template.py says how. Each runs as a script of a rank."""
