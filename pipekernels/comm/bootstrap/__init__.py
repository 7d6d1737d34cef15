"""How processes become the ranks of a communicator. Called only by ``Communicator``."""
