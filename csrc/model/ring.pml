/* The ring all-reduce: is every chunk read before its slot is overwritten, and does no rank wait
 * forever?
 *
 * Every rank makes one call after another, each of 1 .. CHUNKS chunks.
 *
 *   meet()                     the signal() and wait() at the beginning and at the end of ring()
 *   reduce(), gather(), send_result()   the lambdas of ring() in all_reduce.cpp
 *   ring()                     ring(), ring_schedule(), and finish_chunks()
 *
 * A partial result is the set of ranks whose terms are in it. In rank order a slot holds one; with
 * TREE it holds the stack of tree_order.h. combine() joins the top entries with a rank's own term, as
 * combine_units() of ring.cuh and the kernels of reduce_kernels.cpp do; the others are copied on.
 *
 * A step of the model is a reduce() or gather() with its wait() and its raise(). Mailboxes hold the
 * numbers of their chunks. Numbers are kept modulo CYCLE, which is far more than ranks can be
 * apart, so the search covers endless runs.
 *
 * Switches that break the model: SLOTS=LAG (one slot too few), BREAK_RAISE (reduce() raises before
 * it writes), BREAK_SCHEDULE (rank 0 waits for a result before it has begun the chunk), BREAK_TREE
 * (a rank does not pass on the entries of the stack that it leaves as they are).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef LAG
#define LAG RANKS
#endif
#ifndef SLOTS
#define SLOTS (LAG + 1) /* The fewest that ring_schedule.h allows. */
#endif
#ifndef CHUNKS
#define CHUNKS (SLOTS + 2)
#endif
#define CYCLE (4 * SLOTS)

#define MOST 2 /* Partial results in a slot. */
#ifdef TREE
#define PARTIALS(terms) (((terms) & 1) + ((terms) >> 1 & 1) + ((terms) >> 2 & 1))
#else
#define PARTIALS(terms) ((terms) > 0)
#endif
#define KEPT (me == LAST -> 0 : PARTIALS(me + 1) - 1)

typedef Rank {
  byte arrivals;
  byte reduce_sent, gather_sent; /* How many chunks are sent, modulo CYCLE. */
  byte reduce_mailbox[SLOTS], gather_mailbox[SLOTS];
  byte partials[SLOTS * MOST]; /* Bit r: the term of rank r. */
};
Rank rank[RANKS];
byte entered, length; /* Of the call that ranks are entering. */

hidden byte p, q, total, size;

#define LAST (RANKS - 1)
#define BEFORE ((me + LAST) % RANKS)
#define NUMBER(i) ((first + (i)) % CYCLE)
#define SENT(counter, i) ((counter + CYCLE - NUMBER(i) - 1) % CYCLE < CYCLE / 2)

#define REACHED(peer) (rank[peer].arrivals >= rank[me].arrivals)
#if RANKS == 2
#define ARRIVED (REACHED(0) && REACHED(1))
#elif RANKS == 3
#define ARRIVED (REACHED(0) && REACHED(1) && REACHED(2))
#else
#define ARRIVED (REACHED(0) && REACHED(1) && REACHED(2) && REACHED(3))
#endif

inline meet() {
  d_step {
    rank[me].arrivals++;
    q = 0;
    for (p : 0 .. LAST) { q = q + (rank[p].arrivals > 0) }
    if
    :: q == RANKS -> for (p : 0 .. LAST) { rank[p].arrivals-- }
    :: else
    fi;
    skip
  }
  ARRIVED
}

inline send_result(i) {
  rank[me].gather_mailbox[NUMBER(i) % SLOTS] = NUMBER(i) + 1;
  rank[me].gather_sent = NUMBER(i + 1)
}

#define PARTIAL(peer, i, p) rank[peer].partials[(NUMBER(i) % SLOTS) * MOST + (p)]

inline combine(i) {
  total = 1 << me;
  size = 1;
  p = PARTIALS(me);
  do
  :: p > KEPT ->
    p--;
    assert((PARTIAL(BEFORE, i, p) & total) == 0);
#ifdef TREE /* Subtrees of one size; only the last rank combines others, if they are no power of 2. */
    assert(me == LAST || PARTIAL(BEFORE, i, p) << size == total);
    size = 2 * size;
#endif
    total = total | PARTIAL(BEFORE, i, p)
  :: else -> break
  od
}

inline reduce(i) {
#ifdef BREAK_RAISE
  d_step {
    me == 0 || SENT(rank[BEFORE].reduce_sent, i);
    if
    :: me != LAST -> rank[me].reduce_sent = NUMBER(i + 1)
    :: else
    fi;
    skip
  }
#endif
  d_step {
    me == 0 || SENT(rank[BEFORE].reduce_sent, i);
    assert(me == 0 || rank[BEFORE].reduce_mailbox[NUMBER(i) % SLOTS] == NUMBER(i) + 1);
    combine(i);
    if
    :: me == LAST ->
      assert(total == (1 << RANKS) - 1);
      send_result(i)
    :: else ->
#ifndef BREAK_TREE
      for (p : 0 .. KEPT - 1) { PARTIAL(me, i, p) = PARTIAL(BEFORE, i, p) }
#endif
      PARTIAL(me, i, KEPT) = total;
      rank[me].reduce_mailbox[NUMBER(i) % SLOTS] = NUMBER(i) + 1;
      rank[me].reduce_sent = NUMBER(i + 1)
    fi;
    skip
  }
}

inline gather(i) {
  if
  :: me == LAST
  :: else ->
    d_step {
      SENT(rank[BEFORE].gather_sent, i);
      assert(rank[BEFORE].gather_mailbox[NUMBER(i) % SLOTS] == NUMBER(i) + 1);
      if
      :: me != LAST - 1 -> send_result(i)
      :: else
      fi;
      skip
    }
  fi
}

active [RANKS] proctype ring() {
  byte me = _pid;
  byte first, chunks, i;
  do
  :: atomic { /* The first rank to enter chooses the length. */
      if
      :: entered == 0 -> select(chunks : 1 .. CHUNKS)
      :: else -> chunks = length
      fi;
      entered = (entered + 1) % RANKS;
      length = (entered == 0 -> 0 : chunks)
    }
    meet();
    do
    :: i < chunks + LAG ->
#ifdef BREAK_SCHEDULE
      if
      :: me == 0 && i < chunks -> gather(i)
      :: else
      fi;
#endif
      if
      :: i < chunks -> reduce(i)
      :: else
      fi;
      if
      :: i >= LAG -> gather(i - LAG)
      :: else
      fi;
      i++
    :: else -> break
    od;
    first = (first + chunks) % CYCLE;
    chunks = 0;
    i = 0;
    meet()
  od
}
