"""How the processes of a job become the ranks of a communicator. Called by ``Communicator``
alone."""
