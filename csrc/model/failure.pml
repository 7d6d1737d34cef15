/* Ranks that fail, close or die: are their data safe, and do exactly the peers that need them
 * throw?
 *
 * Every rank makes CALLS calls in which all ranks read all data in place: signal, wait, read,
 * signal, wait, leave, overwrite. A rank may close its communicator before each call, and give up
 * in any wait, GIVE_UPS times in all. With KILL the ranks are processes, of which one is killed at
 * any time.
 *
 *   rank()        run_collective(); Communicator::close() and abort() between calls
 *   store...()    stores to RankState, sequentially consistent or weaker
 *   await()       Communicator::await_arrivals(), with await_slowly() and check_peers(). A rank
 *                 checks its peers repeatedly, because Signal::sleep() has a time limit (its
 *                 wake-ups are in signal.pml), so whatever a check would find is found eventually
 *   check_process()   Communicator::check_processes()
 *   fail          Collective::abandon() and Communicator::fail(), after which the user frees the
 *                 data; processes do not wait for peers, since SymmetricHeap::isolate() leaves the
 *                 peers the shared pages
 *   memory()      the store buffers: stores of a rank take effect in order, but late
 *
 * A sequentially consistent store takes effect before any later load of the rank.
 *
 * Switches that break the model: BREAK_FAIL (fail() does not wait for peers that are inside),
 * BREAK_CHECK (a wait that is over does not check for failures), BREAK_STATUS, BREAK_ENTER (fail(),
 * or a rank that enters, stores with release order), BREAK_FAILED_CALL (a failure counts in earlier
 * calls, too), BREAK_ORDER (check_peers() and check_processes() read the signal before the status),
 * BREAK_LEAVE (a rank leaves right after its last signal), BREAK_CULPRIT (with KILL: the rank that
 * detected a failure is named as its cause).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef GIVE_UPS
#define GIVE_UPS 1
#endif

#define OPEN 0
#define CLOSED 1
#define FAILED(culprit) (2 + (culprit))
#ifndef BREAK_CULPRIT
#define CULPRIT(r, s) ((s) == CLOSED -> (r) : (s) - 2)
#else
#define CULPRIT(r, s) (r)
#endif

byte arrivals[RANKS], status[RANKS], failed_call[RANKS];
bool inside[RANKS];

/* State for the assertions: the call that a rank's data belong to (0: freed or overwritten), the
 * number of calls it has completed, whether it is dead, and how often ranks may still give up. */
byte tensor[RANKS], completed[RANKS];
bool dead[RANKS];
#ifdef KILL
byte give_ups;
#else
byte give_ups = GIVE_UPS;
#endif

#define INSIDE 1
#define STATUS 2
#define ARRIVALS 3
chan buffer[RANKS] = [4] of { byte, byte };

inline put(r, variable, value) {
  if
  :: variable == INSIDE -> inside[r] = value
  :: variable == STATUS -> status[r] = value
  :: else -> arrivals[r] = value
  fi;
  skip
}

active [RANKS] proctype memory() {
  byte variable, value;
end:
  do
  :: d_step {
      buffer[_pid] ? variable, value ->
      put(_pid, variable, value);
      variable = 0;
      value = 0
    }
  od
}

inline store(variable, value) { buffer[me] ! variable, value }

inline store_seq_cst(variable, value) { d_step { empty(buffer[me]) -> put(me, variable, value) } }

inline store_entering(variable, value) {
#ifdef BREAK_ENTER
  store(variable, value)
#else
  store_seq_cst(variable, value)
#endif
}

inline store_failing(variable, value) {
#ifdef BREAK_STATUS
  store(variable, value)
#else
  store_seq_cst(variable, value)
#endif
}

/* Fails because of rank `other`, which must not have completed this call. */
inline blame(other) {
  assert(completed[other] < call);
#ifdef KILL
  assert(dead[culprit]);
#endif
  goto fail
}

inline check_peer(other) {
#ifdef BREAK_ORDER
  arrivals[peer] < target -> found = status[other];
  if
  :: found != OPEN -> culprit = CULPRIT(other, found); blame(other)
  :: else
  fi
#else
  status[other] != OPEN -> found = status[other];
  if
  :: arrivals[peer] < target -> culprit = CULPRIT(other, found); blame(other)
  :: else
  fi;
#endif
  found = 0
}

inline check_process(other) {
#ifdef BREAK_ORDER
  arrivals[peer] < target ->
  if
  :: dead[other] ->
#else
  dead[other] ->
  if
  :: arrivals[peer] < target ->
#endif
    /* A rank may have failed before; its status names the culprit. */
    i = 0;
    do
    :: i < RANKS && status[i] != OPEN && arrivals[peer] < target ->
      culprit = CULPRIT(i, status[i]);
      blame(i)
    :: i < RANKS && !(status[i] != OPEN && arrivals[peer] < target) -> i++
    :: i == RANKS -> break
    od;
    i = 0;
    culprit = other;
    blame(other)
  :: else
  fi
}

inline await() {
  peer = 0;
  do
  :: peer == RANKS -> break
  :: peer == me -> peer++
  :: peer < RANKS && peer != me ->
    do
    :: arrivals[peer] >= target -> break
    :: arrivals[peer] < target && give_ups > 0 -> give_ups--; culprit = me; goto fail
    :: check_peer(0)
    :: check_peer(1)
#if RANKS > 2
    :: check_peer(2)
#endif
#if RANKS > 3
    :: check_peer(3)
#endif
#ifdef KILL
    :: check_process(0)
    :: check_process(1)
#if RANKS > 2
    :: check_process(2)
#endif
#if RANKS > 3
    :: check_process(3)
#endif
#endif
    od;
#ifndef BREAK_CHECK
    found = status[peer];
    if
#ifdef BREAK_FAILED_CALL
    :: found > CLOSED -> culprit = CULPRIT(peer, found); blame(peer)
#else
    :: found > CLOSED && failed_call[peer] <= call -> culprit = CULPRIT(peer, found); blame(peer)
#endif
    :: else
    fi;
    found = 0;
#endif
    peer++
  od;
  peer = 0
}

active [RANKS] proctype rank() {
  byte me = _pid - RANKS;
  byte call, target, peer, found, culprit, i;
  {
    do
#ifdef KILL
    :: call == CALLS -> goto close
#else
    :: goto close
#endif
    :: call < CALLS && give_ups > 0 -> /* abort(): the failure counts from the next call on. */
      give_ups--;
      failed_call[me] = call + 1;
      found = FAILED(me);
      store_seq_cst(STATUS, found);
      found = 0;
      goto gone
    :: call < CALLS ->
      call++;
      tensor[me] = call;
      store_entering(INSIDE, 1);
      target++;
      store_entering(ARRIVALS, target);
      await();
      i = 0;
      do
      :: i < RANKS -> assert(tensor[i] == call); i++
      :: else -> break
      od;
      i = 0;
      target++;
      store_seq_cst(ARRIVALS, target);
#ifndef BREAK_LEAVE
      await();
#endif
      store(INSIDE, 0);
      d_step { completed[me] = call; tensor[me] = 0 }
    od;

close:
    store_seq_cst(STATUS, CLOSED);
    goto gone;

fail:
    failed_call[me] = call;
    found = FAILED(culprit);
    store_failing(STATUS, found);
    found = 0;
    store_failing(INSIDE, 0);
#ifndef KILL
#ifndef BREAK_FAIL
    i = 0;
    do
    :: i < RANKS && (i == me || !inside[i]) -> i++
    :: i == RANKS -> break
    od;
#endif
    tensor[me] = 0;
#endif

gone:
    skip
  } unless { dead[me] }
}

#ifdef KILL
active proctype killer() {
  byte victim;
  if
  :: select(victim : 0 .. RANKS - 1); dead[victim] = true
  :: true /* No victim. */
  fi
}
#endif
