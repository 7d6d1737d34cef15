"""The ``torch.distributed`` backend ``"pipekernels"``, with faster collectives for CPU tensors.

Where the package is installed, programs need no import; elsewhere, as in its source folder,
importing this module registers the backend::

    torch.distributed.init_process_group("pipekernels")

Then ``all_reduce``, ``reduce``, ``reduce_scatter``, ``all_gather``, ``gather``, ``scatter`` and
their variants on one tensor or several, ``broadcast`` and ``barrier`` run on a
:class:`pipekernels.Communicator`, also in DDP, FSDP, DTensor and functional collectives, with all
of torch's reductions, for every dtype that has them (``distributed/derived.py`` says how), as do
``all_to_all`` and point-to-point calls. Gloo runs calls with sparse tensors. A group over several
hosts is torch's own Gloo group, with Gloo's collectives, results and errors: see
:doc:`/guides/hosts`. Torch restricts ``monitored_barrier``, and DDP's built-in C++ hook
``FP16_COMPRESS``, to its own backends; the Python hook of that name works. ``split_group`` needs an
accelerator: use ``new_group``.

Asynchronous calls run one after another: small ones where they are made, if all peers come within
20 us, the others on a thread of the group. A lost rank ends the group: its
errors are a communicator's (:class:`pipekernels.PeerError`, ``TimeoutError``); if torch
waits in C++, as in DDP, they arrive as a ``RuntimeError`` that quotes them.

With ``init_process_group("cpu:pipekernels,cuda:nccl")`` collectives of CUDA tensors run on a second
group, of NCCL, which the first of them makes: all ranks of a group must take part in it. Name
``cpu`` first: otherwise torch makes an NCCL backend that is never used, and warns that it was not
destroyed. Do not pass ``device_id``. Point-to-point calls of CUDA tensors need
``new_group(backend="nccl")``.

Raises:
    ImportError: torch is older than 2.7, which may lose track of a pending call of such a group.
"""

import pipekernels.distributed.backend  # noqa: F401 (It registers the backend.)
