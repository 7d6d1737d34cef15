"""Models, fakes, and what starts processes, for the tests."""

# Seconds a test may take. The limit ends what hangs and measures nothing: it is ten times what the
# longest test takes on a quiet machine. Communicators of tests wait for a third of it.
LIMIT = 900.0
TIMEOUT = LIMIT / 3
