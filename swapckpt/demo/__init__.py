"""The demo: a real training run that swaps its optimizer state, is killed in a save, and resumes bit for bit.

``model`` and ``corpus`` are what is trained, ``trainer`` is the script that every rank runs (the one to read
first), ``ranks`` starts and ends them, ``story`` tells the three runs, ``verdict`` compares them,
``display`` and ``pictures`` show them.
"""
