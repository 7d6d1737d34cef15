/* Signal: spin, sleep on a futex, wake. Does every sleeper wake without its time limit?
 *
 *   owner()                   Signal::raise(), once for every value up to VALUES
 *   waiter()                  Communicator::await(), for every value in turn
 *     sleep                   Signal::sleep() without `limit`, so a lost wake-up is a deadlock
 *   FUTEX_WAIT, FUTEX_WAKE    the system calls; each is one step, because of the kernel's lock
 *   memory()                  the owner's store buffer: stores that no other rank sees yet
 *
 * A sequentially consistent store is visible to all ranks before the owner continues. A weaker
 * store may stay in the owner's store buffer while the owner continues and reads `sleepers`.
 *
 * Switches that break the model: BREAK_WAKE (raise() wakes no rank), BREAK_STORE (raise() stores
 * with release order), BREAK_COMPARE (FUTEX_WAIT sleeps whatever the value), BREAK_SLEEPERS
 * (sleep() increments `sleepers` after FUTEX_WAIT).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef VALUES
#define VALUES 3
#endif

byte value;
byte sleepers;
bool asleep[RANKS];  /* In the futex's queue. */
byte buffered;       /* The owner's store buffer: a value that is not in memory yet, or 0. */

inline store_value(v) {
#ifdef BREAK_STORE
  buffered == 0 -> buffered = v
#else
  value = v
#endif
}

active proctype memory() {
end:
  do
  :: d_step { buffered != 0 -> value = buffered; buffered = 0 }
  od
}

active proctype owner() {
  byte v, i;
  for (v : 1 .. VALUES) {
    store_value(v);
    if
    :: sleepers != 0 ->
      d_step {  /* FUTEX_WAKE */
        if
        :: buffered != 0 -> value = buffered; buffered = 0  /* A system call empties the buffer. */
        :: else
        fi;
#ifndef BREAK_WAKE
        for (i : 0 .. RANKS - 1) { asleep[i] = false }
#endif
        i = 0
      }
    :: else
    fi
  }
}

/* All ranks except the owner. */
active [RANKS - 1] proctype waiter() {
  byte me = _pid - 2;
  byte target, seen;
  for (target : 1 .. VALUES) {
    do
    :: value >= target -> break
    :: value < target ->
#ifndef BREAK_SLEEPERS
      sleepers++;
#endif
      seen = value;
      if
      :: seen < target ->
        d_step {  /* FUTEX_WAIT */
          if
#ifdef BREAK_COMPARE
          :: true -> asleep[me] = true
#else
          :: value == seen -> asleep[me] = true
#endif
          :: else
          fi
        }
#ifdef BREAK_SLEEPERS
        sleepers++;
#endif
        !asleep[me]
      :: else
#ifdef BREAK_SLEEPERS
        -> sleepers++
#endif
      fi;
      sleepers--;
      seen = 0
    od
  }
}
