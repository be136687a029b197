/* Persistent publish of one rail: every leader reads the version of this step, whole.
 *
 * Owns: the rules by which owners' new weights travel a rail. Tiles go in order, each with a flag
 * that carries the version. A node that does not own a parameter relays a tile once its flag is
 * there and raises the parameter's arrival after the last tile; the step's forward waits for
 * arrivals. An owner writes the next version after a norm barrier, which every node enters after
 * its last read of this one. The copies are written in place: no staging, no credits.
 * Bounds: R nodes in one rail, node r owns parameter r where r < P, T tiles, ROUNDS versions.
 *
 * A put is a message of its own: the network reads the source copy when it delivers, the flag is
 * a later step, and put_done (the exit of the kernel waits for it) is delivery.
 * Abstracted: tiles of a parameter are posted in order, parameters in any order (this covers any
 * relay window); a copy holds its version, not its bytes; the forward reads each parameter in one
 * step, in any order; the kernel of the next round starts after the exit of this one.
 *
 * Macros that change the model; tools/verify_models.py lists them with what must be found:
 *   BOOLEAN_FLAG       a flag says "there", not which version
 *   RELAY_BEFORE_FLAG  a relay posts a tile without waiting for its flag
 *   NO_BARRIER         owners write the next version without waiting for the norm barrier
 *   FLAG_BEFORE_DATA   the flag of a put may become visible before its bytes
 *   ARRIVAL_AT_FIRST   the arrival of a parameter is raised after its first tile
 *   EARLY_TASK         a task is queued before the owner's copy is written
 *
 * States stored (spin 6.5.2, defaults R=3 P=2 T=2 ROUNDS=2): 285203; P=1 ROUNDS=3 95340;
 * P=3 T=1 350637, ROUNDS=3 535156.
 * Until the breach: BOOLEAN_FLAG 87, RELAY_BEFORE_FLAG 19, NO_BARRIER 109, FLAG_BEFORE_DATA 1506,
 * ARRIVAL_AT_FIRST 26, EARLY_TASK 27308.
 */

#ifndef R
#define R 3
#endif
#ifndef P
#define P 2
#endif
#ifndef T
#define T 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#if R > 3 || P > R || T > 2
#error "R is 2 or 3, P at most R, T at most 2"
#endif

#define IDLE 0
#define POSTED 1
#define DELIVERED 2

#define NEXT(r) (((r) + 1) % R)
#define OWNS(r, p) ((r) == (p))
#define ENDS(r, p) (NEXT(r) == (p)) /* the node before the owner relays to nobody */
#define AT(r, p) ((r) * P + (p))
#define TILE(r, p, i) (((r) * P + (p)) * T + (i))

byte copy[R * P * T];   /* the version that a leader's copy holds */
byte flag[R * P * T];
byte flight[R * P * T]; /* by sender: the put of this tile */
byte arrival[R * P];
byte task[R * P]; /* the version of the last task queued, at the owner */
byte next[R * P]; /* the tile to post next in this round, or those seen at the end of a chain */
byte kernel[R];   /* the round of the publish kernel */
byte left[R];     /* and the last that it has left */
byte step[R];     /* of the stream: the version that it makes, or reads */
byte reads[R];    /* parameters of that version read, as bits */
byte entered;     /* nodes in the norm barriers so far */

#ifdef BOOLEAN_FLAG
#define FLAG_OF(t) 1
#else
#define FLAG_OF(t) (t)
#endif
#ifdef RELAY_BEFORE_FLAG
#define SEEN(r, p, i, t) (ENDS(r, p) -> flag[TILE(r, p, i)] == FLAG_OF(t) : true)
#else
#define SEEN(r, p, i, t) (flag[TILE(r, p, i)] == FLAG_OF(t))
#endif
#define PUBLISHING(r) (kernel[r] != left[r])
#ifdef ARRIVAL_AT_FIRST
#define ARRIVED(r, p) (next[AT(r, p)] > 0)
#else
#define ARRIVED(r, p) (next[AT(r, p)] == T)
#endif
#define DRAINED_TILE(r, p, i) (flight[TILE(r, p, i)] != POSTED)
#if T > 1
#define DRAINED(r, p) (DRAINED_TILE(r, p, 0) && DRAINED_TILE(r, p, 1))
#else
#define DRAINED(r, p) DRAINED_TILE(r, p, 0)
#endif
#define RETIRED(r, p) \
  (next[AT(r, p)] == T && DRAINED(r, p) && (OWNS(r, p) || arrival[AT(r, p)] == kernel[r]))
#if P == 1
#define ALL(holds, r) holds(r, 0)
#elif P == 2
#define ALL(holds, r) (holds(r, 0) && holds(r, 1))
#else
#define ALL(holds, r) (holds(r, 0) && holds(r, 1) && holds(r, 2))
#endif

#define PUBLISH(p) \
  :: d_step { /* a task: the owner posts a tile */ \
       PUBLISHING(me) && OWNS(me, p) && task[AT(me, p)] >= kernel[me] && next[AT(me, p)] < T && \
         flight[TILE(me, p, next[AT(me, p)])] == IDLE -> \
       flight[TILE(me, p, next[AT(me, p)])] = POSTED; \
       next[AT(me, p)]++ \
     } \
  :: d_step { /* a tile has come: relay it */ \
       PUBLISHING(me) && !OWNS(me, p) && next[AT(me, p)] < T && \
         SEEN(me, p, next[AT(me, p)], kernel[me]) && \
         (ENDS(me, p) || flight[TILE(me, p, next[AT(me, p)])] == IDLE) -> \
       if \
       :: ENDS(me, p) -> skip \
       :: else -> flight[TILE(me, p, next[AT(me, p)])] = POSTED \
       fi; \
       next[AT(me, p)]++ \
     } \
  :: d_step { \
       PUBLISHING(me) && !OWNS(me, p) && ARRIVED(me, p) && arrival[AT(me, p)] < kernel[me] -> \
       arrival[AT(me, p)] = kernel[me] \
     }
#define CLEAR(r, p) next[AT(r, p)] = 0

active [R] proctype Kernel() {
#define me _pid
end:
  do
     PUBLISH(0)
#if P > 1
     PUBLISH(1)
#endif
#if P > 2
     PUBLISH(2)
#endif
  :: d_step { /* launched with the first work of the step, after the one before */
       kernel[me] == left[me] && kernel[me] < step[me] ->
       CLEAR(me, 0);
#if P > 1
       CLEAR(me, 1);
#endif
#if P > 2
       CLEAR(me, 2);
#endif
       kernel[me]++
     }
  :: d_step { PUBLISHING(me) && ALL(RETIRED, me) -> left[me] = kernel[me] }
  od
#undef me
}

#ifdef FLAG_BEFORE_DATA
#define FLAG_READY(p, i) (flight[TILE(me, p, i)] >= POSTED && \
                          flag[TILE(NEXT(me), p, i)] != FLAG_OF(kernel[me]))
#define AFTER_DATA(p, i) \
  (flag[TILE(NEXT(me), p, i)] == FLAG_OF(kernel[me]) -> IDLE : DELIVERED)
#define AFTER_FLAG(p, i) (flight[TILE(me, p, i)] == POSTED -> POSTED : IDLE)
#else
#define FLAG_READY(p, i) (flight[TILE(me, p, i)] == DELIVERED)
#define AFTER_DATA(p, i) DELIVERED
#define AFTER_FLAG(p, i) IDLE
#endif
/* A put is of the round of its sender's kernel: every flag is read before the barrier, and the next
 * round comes after it. A flag that came later would carry too high a version, and be noticed. */
#define ROUND(r) kernel[r]

#define DELIVER(p, i) \
  :: d_step { \
       flight[TILE(me, p, i)] == POSTED -> \
       assert(copy[TILE(me, p, i)] == ROUND(me)); \
       copy[TILE(NEXT(me), p, i)] = copy[TILE(me, p, i)]; \
       flight[TILE(me, p, i)] = AFTER_DATA(p, i) \
     } \
  :: d_step { \
       FLAG_READY(p, i) -> \
       assert(flag[TILE(NEXT(me), p, i)] <= FLAG_OF(ROUND(me))); \
       flag[TILE(NEXT(me), p, i)] = FLAG_OF(ROUND(me)); \
       flight[TILE(me, p, i)] = AFTER_FLAG(p, i) \
     }
#if T > 1
#define LINK(p) DELIVER(p, 0) DELIVER(p, 1)
#else
#define LINK(p) DELIVER(p, 0)
#endif

active [R] proctype Network() {
#define me (_pid - R)
end:
  do
     LINK(0)
#if P > 1
     LINK(1)
#endif
#if P > 2
     LINK(2)
#endif
  od
#undef me
}

/* The optimizer of the owner of `me`; then the forward of all parameters; then the norm barrier. */
#define WRITE(i) copy[TILE(me, me, i)] = step[me]
#define WHOLE_TILE(p, i) (copy[TILE(me, p, i)] == step[me])
#if T > 1
#define WRITE_ALL WRITE(0); WRITE(1)
#define WHOLE(p) (WHOLE_TILE(p, 0) && WHOLE_TILE(p, 1))
#else
#define WRITE_ALL WRITE(0)
#define WHOLE(p) WHOLE_TILE(p, 0)
#endif
#define READ(p) \
  :: d_step { \
       !(reads[me] & (1 << p)) && (OWNS(me, p) || arrival[AT(me, p)] >= step[me]) -> \
       assert(WHOLE(p)); \
       reads[me] = reads[me] | (1 << p) \
     }
#define READ_ALL ((1 << P) - 1)

active [R] proctype Stream() {
#define me (_pid - 2 * R)
  do
  :: step[me] < ROUNDS ->
     d_step { step[me]++; reads[me] = 0 }
     if
     :: me < P ->
#ifdef EARLY_TASK
        task[AT(me, me)] = step[me];
        d_step { WRITE_ALL }
#else
        d_step { WRITE_ALL }
        task[AT(me, me)] = step[me]
#endif
     :: else -> skip
     fi;
     do
     :: reads[me] == READ_ALL -> break
     READ(0)
#if P > 1
     READ(1)
#endif
#if P > 2
     READ(2)
#endif
     od;
     entered++;
#ifndef NO_BARRIER
     entered >= R * step[me]
#endif
  :: else -> break
  od
#undef me
}

/* All is over: flags and arrivals carry the last version everywhere. */
#define OUT_OF_ROUNDS(r, p) \
  (OWNS(r, p) || (arrival[AT(r, p)] == ROUNDS && flag[TILE(r, p, 0)] == FLAG_OF(ROUNDS)))
active proctype Judge() {
  left[0] == ROUNDS && left[1] == ROUNDS && left[R - 1] == ROUNDS && entered == R * ROUNDS;
  assert(ALL(OUT_OF_ROUNDS, 0) && ALL(OUT_OF_ROUNDS, 1) && ALL(OUT_OF_ROUNDS, R - 1))
}
