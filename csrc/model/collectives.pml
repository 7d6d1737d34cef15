/* The collectives: does every rank read the data it should, in any endless sequence of calls?
 *
 * Every rank makes one call after another: any operation, of any number of rounds up to ROUNDS, on
 * tensors that its peers can or cannot read in place; it overwrites its tensor after each call.
 * With THREADS > 1 the calls of a rank come from several threads, which lock a mutex. With MISMATCH
 * the ranks may make different calls.
 *
 *   begin()                 Collective::Collective(), the first copy_in(), the first signal()
 *   compare()               Collective::compare_descriptors(), data_of(), direct_ranks()
 *   ARRIVED                 Collective::wait(); failures during it are in failure.pml
 *   signal()                Collective::signal(); how it wakes sleepers is in signal.pml
 *   copy_in(), reduce(), gather()   those of all_reduce.cpp, reduce_scatter.cpp, all_gather.cpp and
 *                           broadcast.cpp
 *   ONE_SHOT .. BROADCAST   the functions of these names; BARRIER: barrier() and empty tensors
 *   leave()                 finish_rounds(), Collective::~Collective(); then the user frees data
 *
 * A step of the model is all that a rank does after a wait() up to its next signal(), since only
 * these two order accesses between ranks. Memory holds tags: the call and the block of the data. If
 * a read and a write are not ordered, then some run executes them in the wrong order, and the read
 * finds a wrong tag.
 *
 * Growing numbers are stored relative to each other, so the search covers endless runs: arrivals
 * relative to the rank with the fewest, calls modulo 2, rounds relative to rank 0 modulo the number
 * of staging buffers.
 *
 * Switches that break the model: SETS=2, DESCRIPTORS=1, BREAK_SIGNAL (a rank signals before it has
 * copied in), BREAK_LEAVE (a rank whose data are read in place does not wait for its peers),
 * BREAK_COMPARE (only the next rank's descriptor is compared), BREAK_MUTEX (threads do not lock the
 * mutex), BREAK_EITHER (a rank overwrites data that its peers may still read in place).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef THREADS
#define THREADS 1
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#ifndef SETS
#define SETS 3
#endif
#ifndef DESCRIPTORS
#define DESCRIPTORS 2
#endif

#define BARRIER 0
#define ONE_SHOT 1
#define EITHER 2 /* one_shot_or_in_place() */
#define TWO_SHOT 3
#define REDUCE_SCATTER 4
#define ALL_GATHER 5
#define BROADCAST 6 /* BROADCAST + r: from rank r, which is the first or the last. */

/* Tags. In staging: block k of a call's input (TAG) or result (REDUCED). In a tensor: a call's
 * INPUT or OUTPUT. 0: nothing. */
#define TAG(call, k) (1 + (call) * 8 + (k))
#define REDUCED(call, k) (5 + (call) * 8 + (k))
#define INPUT(call) (1 + (call) * 2)
#define OUTPUT(call) (2 + (call) * 2)

typedef Descriptor {
  byte operation;
  byte rounds;
  bool direct;
  byte call; /* The call of this descriptor; only for an assertion, not in the C++. */
};

typedef Rank {
  byte arrivals;
  byte call;
  byte base; /* Rounds before this call. */
  bool locked;
  Descriptor descriptors[DESCRIPTORS];
  byte staged[SETS * RANKS]; /* Buffer k, slice of rank s at [k * RANKS + s]. */
  byte tensor[RANKS * ROUNDS]; /* Block k of the slice of rank s at [s * ROUNDS + k]. */
};
Rank rank[RANKS];

/* For calls of either parity: how many ranks have chosen and compared it, the operation and rounds
 * that the first rank has chosen, and the result of the comparison. */
byte entered[2], operations[2], blocks[2], compared[2];
bool verdicts[2];

hidden byte p, q, i, s; /* Temporaries within a step. */

#define CALL rank[me].call
#define MINE rank[me].descriptors[CALL % DESCRIPTORS]
#define OF(peer) rank[peer].descriptors[CALL % DESCRIPTORS]
#define STAGED(peer, k, slice) rank[peer].staged[((rank[me].base + (k)) % SETS) * RANKS + (slice)]
#define BLOCK(peer, slice, k) rank[peer].tensor[(slice) * ROUNDS + (k)]

#define REACHED(peer) (rank[peer].arrivals >= rank[me].arrivals)
#if RANKS == 2
#define ARRIVED (REACHED(0) && REACHED(1))
#elif RANKS == 3
#define ARRIVED (REACHED(0) && REACHED(1) && REACHED(2))
#else
#define ARRIVED (REACHED(0) && REACHED(1) && REACHED(2) && REACHED(3))
#endif

inline signal() {
  rank[me].arrivals++;
  q = 0;
  for (p : 0 .. RANKS - 1) { q = q + (rank[p].arrivals > 0) }
  if
  :: q == RANKS -> for (p : 0 .. RANKS - 1) { rank[p].arrivals-- }
  :: else
  fi
}

/* Chooses the call. The first rank to enter it decides; with MISMATCH the others may differ. */
inline choose() {
  CALL = (CALL + 1) % 2;
  if
  :: entered[CALL] == 0 -> pick()
  :: else ->
    operation = operations[CALL];
    rounds = blocks[CALL]
#ifdef MISMATCH
  :: entered[CALL] != 0 -> pick()
#endif
  fi;
  entered[CALL] = (entered[CALL] + 1) % RANKS;
  operations[CALL] = (entered[CALL] == 0 -> 0 : operation);
  blocks[CALL] = (entered[CALL] == 0 -> 0 : rounds);
  /* `direct` is chosen only where it matters. */
  if
  :: operation >= EITHER && (operation < BROADCAST || operation - BROADCAST == me) -> direct = true
  :: direct = false
  fi
}

inline pick() {
  if
  :: operation = BARRIER
  :: operation = TWO_SHOT
  :: operation = ALL_GATHER
#ifndef MISMATCH /* Fewer operations with MISMATCH, to keep the number of states small. */
  :: operation = ONE_SHOT
  :: operation = EITHER
  :: operation = REDUCE_SCATTER
  :: operation = BROADCAST
  :: operation = BROADCAST + RANKS - 1
#endif
  fi;
  if
  :: operation == BARRIER -> rounds = 0
  :: operation == EITHER -> rounds = 1
  :: else -> select(rounds : 1 .. ROUNDS)
  fi
}

inline begin() {
  MINE.operation = operation;
  MINE.rounds = rounds;
  MINE.direct = direct;
  MINE.call = CALL;
  operation = 0; rounds = 0; direct = false;
  for (i : 0 .. RANKS * ROUNDS - 1) { rank[me].tensor[i] = INPUT(CALL) }
#ifndef BREAK_SIGNAL
  copy_in(0);
#endif
  signal()
}

inline compare() {
  same = true;
#ifdef BREAK_COMPARE
  p = (me + 1) % RANKS;
#else
  for (p : 0 .. RANKS - 1) {
#endif
    assert(OF(p).call == CALL);
    same = same && OF(p).operation == MINE.operation && OF(p).rounds == MINE.rounds;
#ifndef BREAK_COMPARE
  }
#endif
  /* All ranks find the same result. */
  assert(compared[CALL] == 0 || verdicts[CALL] == same);
  compared[CALL] = (compared[CALL] + 1) % RANKS;
  verdicts[CALL] = same && compared[CALL] > 0;
  direct_ranks = 0;
  if
  :: same -> for (p : 0 .. RANKS - 1) { direct_ranks = direct_ranks + OF(p).direct }
  :: else
  fi;
  forget()
}

/* Clears what this rank staged and published in the previous call, which no rank reads any more. */
inline forget() {
  for (i : 0 .. SETS * RANKS - 1) {
    if
    :: rank[me].staged[i] != 0 && (rank[me].staged[i] - 1) / 8 != CALL -> rank[me].staged[i] = 0
    :: else
    fi
  }
#if DESCRIPTORS == 2
  rank[me].descriptors[1 - CALL].operation = 0;
  rank[me].descriptors[1 - CALL].rounds = 0;
  rank[me].descriptors[1 - CALL].direct = false
#endif
}

inline copy_in(k) {
  if
  :: MINE.direct || (k) >= MINE.rounds
  :: else ->
    if
    :: MINE.operation >= ONE_SHOT &&
       (MINE.operation <= ALL_GATHER || MINE.operation == BROADCAST + me) ->
      for (s : 0 .. RANKS - 1) { STAGED(me, k, s) = TAG(CALL, k) }
    :: else
    fi
  fi
}

/* Reads everything that `peer` has staged in round k. */
inline read_staged(peer, k) {
  for (s : 0 .. RANKS - 1) { assert(STAGED(peer, k, s) == TAG(CALL, k)) }
}

/* The reduction of one_shot_or_in_place(), of the whole tensor. */
inline reduce_either() {
  for (p : 0 .. RANKS - 1) {
    if
    :: OF(p).direct -> for (i : 0 .. RANKS - 1) { assert(BLOCK(p, i, 0) == INPUT(CALL)) }
    :: else -> read_staged(p, 0)
    fi
  }
  if
  :: MINE.direct -> STAGED(me, 0, me) = REDUCED(CALL, 0)
  :: else -> write_either()
  fi
}

inline write_either() {
  for (i : 0 .. RANKS - 1) { BLOCK(me, i, 0) = OUTPUT(CALL) }
}

/* Reduces block k of this rank's slice; with TWO_SHOT writes the result to all ranks. */
inline reduce(k) {
  for (p : 0 .. RANKS - 1) {
    if
    :: MINE.operation == ONE_SHOT -> read_staged(p, k)
    :: else ->
      if
      :: p == me || OF(p).direct -> assert(BLOCK(p, me, k) == INPUT(CALL))
      :: else -> assert(STAGED(p, k, me) == TAG(CALL, k))
      fi
    fi
  }
  if
  :: MINE.operation == TWO_SHOT ->
    for (p : 0 .. RANKS - 1) {
      if
      :: p == me || OF(p).direct -> BLOCK(p, me, k) = OUTPUT(CALL)
      :: else -> STAGED(p, k, me) = REDUCED(CALL, k)
      fi
    }
  :: else
  fi
}

/* Reads block k of the other ranks, or of the root. */
inline gather(k) {
  for (p : 0 .. RANKS - 1) {
    if
    :: p == me || (MINE.operation >= BROADCAST && p != MINE.operation - BROADCAST)
    :: else ->
      if
      :: MINE.operation == TWO_SHOT && !MINE.direct ->
        assert(STAGED(me, k, p) == REDUCED(CALL, k));
        BLOCK(me, p, k) = OUTPUT(CALL)
      :: MINE.operation != TWO_SHOT && OF(p).direct -> assert(BLOCK(p, me, k) == INPUT(CALL))
      :: MINE.operation != TWO_SHOT && !OF(p).direct -> read_staged(p, k)
      :: else
      fi
    fi
  }
}

/* Reads and writes this rank's slice of all tensors. */
inline two_shot_in_place() {
  for (i : 0 .. MINE.rounds - 1) {
    for (p : 0 .. RANKS - 1) {
      assert(BLOCK(p, me, i) == INPUT(CALL));
      BLOCK(p, me, i) = OUTPUT(CALL)
    }
  }
}

inline read_in_place() {
  for (i : 0 .. MINE.rounds - 1) {
    if
    :: MINE.operation == REDUCE_SCATTER -> reduce(i)
    :: else -> gather(i)
    fi
  }
}

/* Rotates the staging buffers of all ranks, so that the next one of rank 0 is buffer 0. */
inline turn_sets(count) {
  for (p : 0 .. RANKS - 1) {
    rank[p].base = (rank[p].base + 2 * SETS - count) % SETS;
    i = count;
    do
    :: i == 0 -> break
    :: else ->
      i--;
      for (s : 0 .. RANKS - 1) {
        q = rank[p].staged[s];
        rank[p].staged[s] = rank[p].staged[RANKS + s];
#if SETS == 3
        rank[p].staged[RANKS + s] = rank[p].staged[2 * RANKS + s];
#endif
        rank[p].staged[(SETS - 1) * RANKS + s] = q
      }
    od
  }
}

inline leave(count) {
  if
  :: (MINE.operation == TWO_SHOT || MINE.operation == EITHER) && same ->
    for (p : 0 .. RANKS - 1) {
      for (i : 0 .. MINE.rounds - 1) { assert(BLOCK(me, p, i) == OUTPUT(CALL)) }
    }
  :: else
  fi;
  rank[me].base = (rank[me].base + count) % SETS;
  if
  :: me == 0 -> turn_sets(count)
  :: else
  fi;
  for (i : 0 .. RANKS * ROUNDS - 1) { rank[me].tensor[i] = 0 }
  same = false; direct_ranks = 0; k = 0;
  rank[me].locked = false
}

active [RANKS * THREADS] proctype thread() {
  byte me = _pid / THREADS;
  byte operation, rounds, k, direct_ranks;
  bool direct, same;
next:
  skip;
  atomic {
#ifndef BREAK_MUTEX
    !rank[me].locked ->
#endif
    rank[me].locked = true;
    choose();
    d_step { begin() }
  }
#ifdef BREAK_SIGNAL
  d_step { copy_in(0) }
#endif
  d_step { ARRIVED -> compare() }
  if
  :: !same || MINE.operation == BARRIER -> goto left_without_rounds
  :: else
  fi;

  if
  :: MINE.operation == ONE_SHOT ->
    do
    :: d_step {
      ARRIVED && k + 1 < MINE.rounds ->
      reduce(k);
      k++;
      copy_in(k);
      signal()
    }
    :: d_step { ARRIVED && k + 1 == MINE.rounds -> reduce(k); leave(MINE.rounds) };
      skip -> break
    od

  :: MINE.operation == EITHER && direct_ranks == 0 ->
    d_step { reduce_either(); leave(1) };
    skip

  :: MINE.operation == EITHER && direct_ranks > 0 && direct_ranks < RANKS ->
    d_step { reduce_either(); signal() };
    skip;
#ifndef BREAK_EITHER
    d_step {
      ARRIVED ->
#else
    d_step {
#endif
      if
      :: MINE.direct -> assert(STAGED(me, 0, me) == REDUCED(CALL, 0)); write_either()
      :: else
      fi;
    }
    skip;
    d_step { ARRIVED -> leave(1) };
    skip

  :: (MINE.operation == EITHER || MINE.operation == TWO_SHOT) && direct_ranks == RANKS ->
    d_step { two_shot_in_place(); signal() };
    skip -> goto left_without_rounds

  :: MINE.operation == TWO_SHOT && direct_ranks < RANKS ->
    do
    :: d_step {
      ARRIVED && k < MINE.rounds ->
      reduce(k);
      copy_in(k + 1);
      signal();
      k++
    }
      if
      :: d_step { k > 1 -> gather(k - 2); skip }
      :: k <= 1
      fi
    :: d_step { ARRIVED && k == MINE.rounds -> gather(k - 1); leave(MINE.rounds) };
      skip -> break
    od

  :: MINE.operation == REDUCE_SCATTER && direct_ranks < RANKS ->
    do
    :: d_step {
      ARRIVED && k + 1 < MINE.rounds ->
      reduce(k);
      k++;
      copy_in(k);
      signal()
    }
    :: d_step { ARRIVED && k + 1 == MINE.rounds && direct_ranks > 0 -> reduce(k); signal() };
      skip -> goto left
    :: d_step {
      ARRIVED && k + 1 == MINE.rounds && direct_ranks == 0 ->
      reduce(k);
      leave(MINE.rounds)
    };
      skip -> break
    od

  :: MINE.operation >= ALL_GATHER && direct_ranks < (MINE.operation == ALL_GATHER -> RANKS : 1) ->
    do
    :: d_step { ARRIVED && k + 1 < MINE.rounds -> copy_in(k + 1); signal() }
      d_step { gather(k); k++ }
    :: d_step { ARRIVED && k + 1 == MINE.rounds && direct_ranks > 0 -> gather(k); signal() };
      skip -> goto left
    :: d_step {
      ARRIVED && k + 1 == MINE.rounds && direct_ranks == 0 ->
      gather(k);
      leave(MINE.rounds)
    };
      skip -> break
    od

  :: else -> /* Every rank reads all data in place. */
    d_step { read_in_place(); signal() };
    skip -> goto left_without_rounds
  fi;
  goto next;

left: /* Peers may read in place until ARRIVED. */
  skip;
#ifndef BREAK_LEAVE
  d_step { ARRIVED -> leave(MINE.rounds) };
  skip;
#else
  d_step { leave(MINE.rounds) };
  skip;
#endif
  goto next;

left_without_rounds:
  skip;
#ifndef BREAK_LEAVE
  d_step { ARRIVED -> leave(0) };
  skip;
#else
  d_step { leave(0) };
  skip;
#endif
  goto next
}
