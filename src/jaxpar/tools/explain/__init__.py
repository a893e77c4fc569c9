"""Why a program waits, and which edits help."""
