/* Pushed words: does every rank read the words it should, and notice different calls, in any endless
 * sequence of calls with pushes and calls with signals?
 *
 * Every rank makes one call after another: one with signals, or an all-reduce that pushes words, in
 * one round with data or without, or in two rounds. With MISMATCH the ranks may make different
 * calls, and then all must notice.
 *
 *   push_round()        BlockCollective::begin_pushes(), push_call() and push_unit(); one word of data
 *   receive()           BlockCollective::wait_calls() and wait_units(); words arrive in any order, and a
 *                       round ends, as the block synchronises, when all have arrived
 *   meet()              BlockCollective::signal() and wait(); CALLS_OTHERWISE is calls_otherwise()
 *   clear()             the inboxes are cleared when the flags are used up, here after FLAGS rounds
 *   word(), signals_of()  what is on its way: each word takes effect at any time, in any
 *                       order; a signal (a release) after all words that its rank pushed before, but
 *                       perhaps after words that it pushes later
 *
 * Words hold a flag and a tag, the parity of the call, by which a reader asserts that it got the
 * word of its own call; then it clears the tag, to keep the number of states small. A word that is overwritten before it is read is waited for in vain,
 * which is a deadlock. Numbers of calls with signals are stored modulo 2: no rank is ahead by more
 * than one.
 *
 * Switches that break the model: INBOXES=1, BREAK_SYNC (a rank begins the next round when all calls
 * have arrived, though it still waits for data), BREAK_EMPTY (calls without data push nothing),
 * BREAK_ATOMIC (flag and tag are two accesses), BREAK_CLEAR (inboxes are not cleared),
 * BREAK_MEETING (after clearing the inboxes, a rank does not wait for its peers), and with MISMATCH
 * BREAK_COMPARE (pushed calls are not compared), BREAK_OTHERWISE (a rank that waits for words does
 * not look for signals), BREAK_NUMBER (the number of calls with signals is not compared),
 * BREAK_RECHECK (words are not read again after a signal has been seen).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef INBOXES
#define INBOXES 2
#endif
#define FLAGS 3

/* Kinds of calls. */
#define SIGNALS 0
#define EMPTY 1
#define ONE_ROUND 2
#define TWO_ROUNDS 3

/* A word: 2 bits of flag, 2 of the tag, and of calls also 2 of the kind and 1 of the number
 * of calls with signals. Word 0 of an inbox is the call, word 1 the data. */
#define FLAG(x) ((x) & 3)
#define TAG(x) (((x) >> 2) & 3)
#define KIND(x) (((x) >> 4) & 3)
#define NUMBER(x) ((x) >> 6)
#define AT(owner, writer, round, which) \
  ((((owner) * RANKS + (writer)) * INBOXES + (round) % INBOXES) * 2 + (which))
#define WORDS (RANKS * RANKS * INBOXES * 2)

byte inbox[WORDS];
byte coming[WORDS]; /* Pushed, but not visible yet; 0: nothing. */
byte arrivals[RANKS]; /* Modulo 8. */
byte raised[RANKS]; /* Signals that are not visible yet. */
byte published[RANKS * 2]; /* Kind and tag of the last two calls with signals. */
bool failed[RANKS];

/* For calls of either parity: how many ranks have chosen it, the kind that the first has chosen,
 * and whether another has chosen differently. */
byte entered[2], kinds[2];
bool differ[2];

hidden byte i, w; /* Temporaries within a step. */

active [WORDS] proctype word() {
end:
  do
  :: atomic { coming[_pid] != 0 -> inbox[_pid] = coming[_pid]; coming[_pid] = 0 }
#ifdef BREAK_ATOMIC
  :: atomic { coming[_pid] != 0 -> inbox[_pid] = (inbox[_pid] & 252) | FLAG(coming[_pid]) }
#endif
  od
}

active [RANKS] proctype signals_of() {
  byte me = _pid - WORDS;
end:
  do
  :: atomic { raised[me] > 0 -> raised[me]--; arrivals[me] = (arrivals[me] + 1) % 8 }
  od
}

/* Whether `peer` has made as many signals as this rank, or more. */
#define AHEAD(peer) ((arrivals[peer] + 8 - signals) % 8)
#define REACHED(peer) (AHEAD(peer) < 4)
#define SIGNALLED_MORE(peer) (AHEAD(peer) > 0 && AHEAD(peer) < 4)
#define CALL_WORD(peer, round) inbox[AT(me, peer, round, 0)]

inline push(which, value) {
  for (i : 0 .. RANKS - 1) {
    if
    :: i != me -> coming[AT(i, me, round, which)] = value
    :: else
    fi
  }
}

/* None of the words of rank `r` is on its way. */
#define NO_WORDS(owner, r) \
  (coming[AT(owner, r, 0, 0)] + coming[AT(owner, r, 0, 1)] + \
   coming[AT(owner, r, 1, 0)] + coming[AT(owner, r, 1, 1)] == 0)
#if RANKS == 2
#define DRAINED(r) (NO_WORDS(0, r) && NO_WORDS(1, r))
#else
#define DRAINED(r) (NO_WORDS(0, r) && NO_WORDS(1, r) && NO_WORDS(2, r))
#endif

inline signal() {
  atomic {
    DRAINED(me);
    published[me * 2 + number] = kind + 4 * call;
    signals = (signals + 1) % 8;
    raised[me]++
  }
}

/* Compares the call that `peer` has published with its signal. */
inline compare_published(peer) {
  assert(published[peer * 2 + number] / 4 == call);
  if
  :: published[peer * 2 + number] % 4 != kind -> assert(differ[call % 2]); goto failure
  :: else
  fi
}

/* A peer pushes in the call in which this rank signals. */
#ifdef BREAK_NUMBER
#define PUSHES_OTHERWISE(peer) \
  (round < FLAGS && FLAG(CALL_WORD(peer, round + 1)) == round + 1)
#else
#define PUSHES_OTHERWISE(peer) \
  (round < FLAGS && FLAG(CALL_WORD(peer, round + 1)) == round + 1 && \
   NUMBER(CALL_WORD(peer, round + 1)) == number)
#endif

/* signal() and wait(). */
inline meet() {
  signal();
  peer = 0;
  do
  :: peer == RANKS -> break
  :: peer == me -> peer++
  :: peer < RANKS && peer != me ->
    if
    :: atomic { REACHED(peer) -> compare_published(peer) }
    :: atomic {
        kind == SIGNALS && PUSHES_OTHERWISE(peer) ->
        assert(TAG(CALL_WORD(peer, round + 1)) == call && differ[call % 2]);
        goto failure
      }
    :: atomic {
        failed[peer] && !REACHED(peer) && !(kind == SIGNALS && PUSHES_OTHERWISE(peer)) ->
        assert(false) /* This rank would not know why. */
      }
    fi;
    peer++
  od;
  peer = 0
}

inline clear() {
  meet();
#ifndef BREAK_CLEAR
  skip;
  d_step { for (i : 0 .. RANKS * INBOXES * 2 - 1) { inbox[me * RANKS * INBOXES * 2 + i] = 0 } }
#endif
#ifndef BREAK_MEETING
  meet();
#endif
  number_used = true
}

inline push_round() {
  round = (round + 1) % (FLAGS + 1);
  if
  :: round == 0 -> clear(); round = 1
  :: else
  fi;
  skip;
  d_step {
#ifdef BREAK_EMPTY
    first = first && kind != EMPTY;
#endif
    for (i : 0 .. RANKS - 1) {
      want_call[i] = first && i != me;
      want_data[i] = kind != EMPTY && i != me
    }
    if
    :: first -> push(0, round + 4 * call + 16 * kind + 64 * number)
    :: else
    fi;
    if
    :: kind != EMPTY -> push(1, round + 4 * call)
    :: else
    fi;
    first = false
  }
}

#if RANKS == 2
#define NONE(want) (!want[0] && !want[1])
#else
#define NONE(want) (!want[0] && !want[1] && !want[2])
#endif
#define HAS_CALL(peer) (FLAG(CALL_WORD(peer, round)) == round)

inline check_call(peer) {
  assert(TAG(CALL_WORD(peer, round)) == call);
  want_call[peer] = false;
#ifndef BREAK_COMPARE
  if
  :: KIND(CALL_WORD(peer, round)) != kind -> assert(differ[call % 2]); goto failure
  :: else
  fi;
#endif
  CALL_WORD(peer, round) = round
}

inline find_other_call(peer) {
  compare_published(peer);
  assert(false) /* The calls are the same after all. */
}

/* What may happen next in receive(), of the words from `peer`. */
#define ARRIVING(peer) \
  :: atomic { want_call[peer] && HAS_CALL(peer) -> check_call(peer) } \
  :: atomic { OTHERWISE(peer) -> find_other_call(peer) } \
  :: atomic { want_call[peer] && failed[peer] && !HAS_CALL(peer) && !SIGNALLED_MORE(peer) -> \
      assert(false) /* This rank would not know why. */ } \
  :: atomic { want_data[peer] && FLAG(inbox[AT(me, peer, round, 1)]) == round -> \
      assert(TAG(inbox[AT(me, peer, round, 1)]) == call); want_data[peer] = false; \
      inbox[AT(me, peer, round, 1)] = round } \
  LATE(peer)

#if defined(BREAK_OTHERWISE)
#define OTHERWISE(peer) false
#elif defined(BREAK_RECHECK)
#define OTHERWISE(peer) (want_call[peer] && !had_call[peer] && SIGNALLED_MORE(peer))
#else
#define OTHERWISE(peer) (want_call[peer] && SIGNALLED_MORE(peer) && !HAS_CALL(peer))
#endif

#ifdef BREAK_SYNC
#define ARRIVED (NONE(want_call) && NONE(late))
#define LATE(peer) \
  :: atomic { late[peer] != 0 && FLAG(inbox[AT(me, peer, late[peer], 1)]) == late[peer] -> \
      late[peer] = 0 }
#else
#define ARRIVED (NONE(want_call) && NONE(want_data))
#define LATE(peer)
#endif

inline receive() {
#ifdef BREAK_RECHECK
  d_step { for (i : 0 .. RANKS - 1) { had_call[i] = HAS_CALL(i) } }
#endif
  do
  ARRIVING(0)
  ARRIVING(1)
#if RANKS > 2
  ARRIVING(2)
#endif
  :: atomic { ARRIVED -> break }
  od;
  skip;
#ifdef BREAK_SYNC
  d_step { for (i : 0 .. RANKS - 1) { late[i] = (want_data[i] -> round : 0) } }
#endif
#ifdef BREAK_RECHECK
  d_step { for (i : 0 .. RANKS - 1) { had_call[i] = false } }
#endif
}

/* Chooses the call. The first rank to enter it decides; with MISMATCH the others may differ. */
inline choose() {
  call = 3 - call; /* 1 or 2. */
  if
  :: entered[call % 2] == 0 -> pick(); kinds[call % 2] = kind; differ[call % 2] = false
  :: else -> kind = kinds[call % 2]
#ifdef MISMATCH
  :: entered[call % 2] != 0 ->
    pick();
    differ[call % 2] = differ[call % 2] || kind != kinds[call % 2]
#endif
  fi;
  entered[call % 2] = (entered[call % 2] + 1) % RANKS
}

inline pick() {
  if
  :: kind = SIGNALS
  :: kind = EMPTY
  :: kind = ONE_ROUND
#ifndef MISMATCH /* To keep the number of states small. */
  :: kind = TWO_ROUNDS
#endif
  fi
}

active [RANKS] proctype rank() {
  byte me = _pid - WORDS - RANKS;
  byte call = 1, kind, number, round, signals, peer;
  bool want_call[RANKS], want_data[RANKS];
#ifdef BREAK_SYNC
  byte late[RANKS];
#endif
#ifdef BREAK_RECHECK
  bool had_call[RANKS];
#endif
  bool first, number_used;
  do
  :: atomic { choose(); first = true };
    if
    :: kind == SIGNALS -> meet(); number_used = true
    :: else ->
      push_round();
      receive();
      if
      :: kind == TWO_ROUNDS -> push_round(); receive()
      :: else
      fi
    fi;
    skip;
    d_step {
      assert(!differ[call % 2]); /* All ranks have chosen by now. */
      number = (number + number_used) % 2;
      number_used = false;
      first = false;
      kind = 0
    }
  od;

failure: /* The peers are told by a release. */
  atomic { DRAINED(me) && raised[me] == 0 -> failed[me] = true }
}
