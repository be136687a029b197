/* Queue rings of AllGatherV: no deadlock, no chunk before its data, no slot rewritten in use.
 *
 * Owns: the rules by which a rail of R nodes passes the chunks of every source around its ring:
 * a queue of S slots for each source, one cursor to forward and one to multicast, an ack upstream
 * after both uses, counters that are never reset, CALLS calls back to back without a drain.
 * Bounds: R nodes, K columns (1 or 2), N(q) chunks of source q in a call, S slots, CALLS calls.
 *
 * A put is a message of its own: the network reads the source when it delivers, in any order within
 * a queue, and raises the arrival counter once all earlier puts of the queue are there. So a
 * rewritten source and a signal that passes data can be seen. A slot holds the sequence number + 1
 * of its chunk; a reader asserts that it is the one it wants.
 * Abstracted:
 * - A node takes any enabled step of any queue: every number of groups and every rotation is one of
 *   these schedules. No step is taken twice, so all runs are finite and "no deadlock" is "done".
 * - An ack arrives at once: the sender only ever acts on an ack that is there, so one that is late
 *   is a sender that looks late.
 * - put_done is delivery (reduce_ring.pml has a completion of its own).
 * - Column 0 is the rail; column 1 is a stream that enters and leaves calls, and owns odd chunks.
 *   The ring of column 1 is the same ring again and shares nothing with this one but the entries.
 *
 * Macros that change the model; tools/verify_models.py lists them with what must be found:
 *   FORWARD_FROM_POOL  sound: a chunk is forwarded from the pool after its multicast
 *   WEAK_SIGNALS       sound at S=1 only: a signal follows its own put's data, not earlier puts
 *   ACK_BEFORE_DONE    ack as soon as both uses are issued, while the put still reads the slot
 *   NO_ENTRY_WAIT      multicast without the entries of the node's other columns
 *   BLOCKING_GROUP     a group finishes its current queue, own first, before it turns to the next
 *   SHARED_CREDIT      one pool of S credits for a link, whatever the source
 *   RESET_ARRIVALS     arrival counters are zeroed when a call is entered
 *   TAKES_NEXT_CALL    what has arrived is not cut at the call's last chunk
 *   NO_DRAIN           a call is left while puts from the pool are under way
 *   UNEVEN             sound: source q has q chunks, so node 0 owns nothing
 *   ONE_HEAVY          sound: source 0 has C chunks, the others LIGHT (default 1)
 *   SPLIT_SIGNAL       sound: the signal of a put is a step of its own; else it comes with the put
 *                      that completes the order: a later one is a receiver that looks late
 *
 * States stored (spin 6.5.2, defaults R=3 K=1 C=2 CALLS=2): S=1 970117, S=2 is too large.
 * FORWARD_FROM_POOL: S=1 588427, S=2 1522528. WEAK_SIGNALS: S=1 970117. SPLIT_SIGNAL: S=1 3255388.
 * S=1 K=2 1114818. ONE_HEAVY: S=1 99113, S=2 293683, S=2 C=3 775255, S=2 R=4 C=3 LIGHT=0 49521.
 * Until the breach: ACK_BEFORE_DONE 140, WEAK_SIGNALS S=2 126, NO_ENTRY_WAIT K=2 13611,
 * BLOCKING_GROUP 16, SHARED_CREDIT 19 (S=2 28), RESET_ARRIVALS 32,
 * TAKES_NEXT_CALL 62, NO_DRAIN 128.
 */

#ifndef R
#define R 3
#endif
#ifndef K
#define K 1
#endif
#ifndef S
#define S 1
#endif
#ifndef C
#define C 2
#endif
#ifndef LIGHT
#define LIGHT 1
#endif
#ifndef CALLS
#define CALLS 2
#endif

#define IDLE 0
#define POSTED 1
#define DELIVERED 2

#ifdef UNEVEN
#define N(q) (q)
#elif defined(ONE_HEAVY)
#define N(q) ((q) == 0 -> C : LIGHT)
#else
#define N(q) C
#endif
#define AT_LEAST_ONE(q) (N(q) + (N(q) == 0)) /* a divisor; an empty queue never divides */

#define NEXT(r) (((r) + 1) % R)
#define OWN(r, q) ((r) == (q))
#define LAST(r, q) (NEXT(r) == (q)) /* the node before the source ends the chain */
#define AT(r, q) ((r) * R + (q))
#define SLOT(r, q, x) (((r) * R + (q)) * S + (x) % S)
#define CALL_OF(q, x) ((x) / AT_LEAST_ONE(q) + 1)

byte call[R];         /* entry of column 0: the call that the node is in, or was in last */
byte done[R];         /* the last call that the node has left */
byte forwarded[R * R]; /* cursors by node and source, over all calls */
byte copied[R * R];
byte acked[R * R]; /* also the counter that the upstream node reads */
byte arr[R * R];
byte slot[R * R * S];
byte flight[R * R * S]; /* by sender, source and slot: the put that was posted last into it */
#if K > 1
byte entry[R]; /* of column 1 */
#define ENTERED(r, e) (entry[r] >= (e))
#else
#define ENTERED(r, e) true
#endif

#ifdef RESET_ARRIVALS
byte raised[R * R]; /* signals given so far: what the network must keep in order */
#define RAISED(r, q) raised[AT(r, q)]
#define ARRIVED(r, q) (arr[AT(r, q)] + (call[r] - 1) * N(q))
#else
#define RAISED(r, q) arr[AT(r, q)]
#define ARRIVED(r, q) arr[AT(r, q)]
#endif

#if K > 1 /* column 0 owns the first chunk of a call and has entered; the second is column 1's */
#define READY(r, q) ((call[r] - 1) * N(q) + (ENTERED(r, call[r]) -> N(q) : (N(q) > 0)))
#else
#define READY(r, q) (call[r] * N(q))
#endif
#define AVAILABLE(r, q) (OWN(r, q) -> READY(r, q) : ARRIVED(r, q))
#ifdef TAKES_NEXT_CALL
#define IN_CALL(r, q, x) true
#else
#define IN_CALL(r, q, x) ((x) < call[r] * N(q))
#endif

#define UNACKED(r, q) (LAST(r, q) -> 0 : forwarded[AT(r, q)] - acked[AT(NEXT(r), q)])
#ifdef SHARED_CREDIT
#if R != 3
#error "SHARED_CREDIT is written for R=3"
#endif
#define CREDIT(r, q) (UNACKED(r, 0) + UNACKED(r, 1) + UNACKED(r, 2) < S)
#else
#define CREDIT(r, q) (UNACKED(r, q) < S)
#endif

#define PUT_DONE(r, q, x) \
  (forwarded[AT(r, q)] > (x) + S || \
   (forwarded[AT(r, q)] > (x) && flight[SLOT(r, q, x)] != POSTED))
#ifdef ACK_BEFORE_DONE
#define READ_OUT(r, q, x) (forwarded[AT(r, q)] > (x))
#elif defined(FORWARD_FROM_POOL)
#define READ_OUT(r, q, x) true
#else
#define READ_OUT(r, q, x) PUT_DONE(r, q, x)
#endif

#ifdef FORWARD_FROM_POOL
#define SOURCE_READY(r, q) (OWN(r, q) || forwarded[AT(r, q)] < copied[AT(r, q)])
#define FROM_POOL(r, q) true
#else
#define SOURCE_READY(r, q) true
#define FROM_POOL(r, q) OWN(r, q)
#endif
#ifdef NO_ENTRY_WAIT
#define MAY_COPY(r) true
#else
#define MAY_COPY(r) ENTERED(r, call[r])
#endif
#ifdef BLOCKING_GROUP
#define TURN(r, q) (current == (q))
#else
#define TURN(r, q) true
#endif
#define MAY_ACK(r, q) \
  (!OWN(r, q) && acked[AT(r, q)] < copied[AT(r, q)] && \
   (LAST(r, q) || READ_OUT(r, q, acked[AT(r, q)])))
#define RUNNING(r) (call[r] != done[r])

#define COMPLETE(r, q) \
  (copied[AT(r, q)] == call[r] * N(q) && \
   (LAST(r, q) || forwarded[AT(r, q)] == call[r] * N(q)) && \
   (OWN(r, q) || acked[AT(r, q)] == call[r] * N(q)))
#define UNREAD(r, q, s) (FROM_POOL(r, q) && flight[SLOT(r, q, s)] == POSTED)
#if S > 1
#define QUEUE_DRAINED(r, q) (!UNREAD(r, q, 0) && !UNREAD(r, q, 1))
#else
#define QUEUE_DRAINED(r, q) (!UNREAD(r, q, 0))
#endif
#ifdef NO_DRAIN
#define FINISHED(r, q) COMPLETE(r, q)
#else
#define FINISHED(r, q) (COMPLETE(r, q) && QUEUE_DRAINED(r, q))
#endif

#if R == 2
#define ALL(holds, r) (holds(r, 0) && holds(r, 1))
#elif R == 3
#define ALL(holds, r) (holds(r, 0) && holds(r, 1) && holds(r, 2))
#elif R == 4
#define ALL(holds, r) (holds(r, 0) && holds(r, 1) && holds(r, 2) && holds(r, 3))
#else
#error "R is 2, 3 or 4"
#endif
#if S > 2
#error "S is 1 or 2"
#endif

/* The steps of a group for one queue; `me` is the node. */
#define STEPS(q) \
  :: d_step { /* forward: a credit, and the chunk */ \
       RUNNING(me) && TURN(me, q) && !LAST(me, q) && IN_CALL(me, q, forwarded[AT(me, q)]) && \
         forwarded[AT(me, q)] < AVAILABLE(me, q) && CREDIT(me, q) && SOURCE_READY(me, q) -> \
       assert(flight[SLOT(me, q, forwarded[AT(me, q)])] == IDLE); \
       flight[SLOT(me, q, forwarded[AT(me, q)])] = POSTED; \
       forwarded[AT(me, q)]++ \
     } \
  :: d_step { /* multicast: the chunk, and every column of the node in this call; then ack */ \
       RUNNING(me) && TURN(me, q) && IN_CALL(me, q, copied[AT(me, q)]) && \
         copied[AT(me, q)] < AVAILABLE(me, q) && MAY_COPY(me) -> \
       assert(OWN(me, q) || slot[SLOT(me, q, copied[AT(me, q)])] == copied[AT(me, q)] + 1); \
       assert(call[me] == CALL_OF(q, copied[AT(me, q)])); \
       assert(ENTERED(me, CALL_OF(q, copied[AT(me, q)]))); \
       copied[AT(me, q)]++; \
       do \
       :: MAY_ACK(me, q) -> acked[AT(me, q)]++ \
       :: else -> break \
       od; \
       assert(acked[AT(me, q)] <= copied[AT(me, q)]) \
     } \
  :: d_step { /* ack alone: the put was what kept the slot */ \
       RUNNING(me) && TURN(me, q) && MAY_ACK(me, q) -> \
       acked[AT(me, q)]++ \
     }

active [R] proctype Node() {
#define me _pid
#ifdef BLOCKING_GROUP
  byte current = me;
#endif
end:
  do
  :: d_step {
       call[me] == done[me] && call[me] < CALLS ->
       call[me]++
#ifdef RESET_ARRIVALS
       ;
       arr[AT(me, 0)] = 0;
       arr[AT(me, 1)] = 0
#if R > 2
       ;
       arr[AT(me, 2)] = 0
#endif
#endif
     }
     STEPS(0)
     STEPS(1)
#if R > 2
     STEPS(2)
#endif
#if R > 3
     STEPS(3)
#endif
#ifdef BLOCKING_GROUP
  :: d_step { RUNNING(me) && COMPLETE(me, current) && NEXT(current) != me ->
              current = NEXT(current) }
#endif
  :: d_step {
       RUNNING(me) && ALL(FINISHED, me) ->
       done[me] = call[me]
#ifdef BLOCKING_GROUP
       ;
       current = me
#endif
     }
  od
#undef me
}

/* The put in slot s was the last one posted into it. */
#define SEQUENCE(q, s) (forwarded[AT(me, q)] - 1 - (forwarded[AT(me, q)] - 1 - (s)) % S)
#ifdef RESET_ARRIVALS
#define COUNT_RAISED(q) raised[AT(NEXT(me), q)]++
#else
#define COUNT_RAISED(q) skip
#endif
#define RAISE(q, s) \
  flight[SLOT(me, q, s)] = IDLE; \
  COUNT_RAISED(q); \
  arr[AT(NEXT(me), q)]++; \
  assert(arr[AT(NEXT(me), q)] <= acked[AT(NEXT(me), q)] + S)

#ifdef WEAK_SIGNALS
#define IN_ORDER(q, s) true
#else
#define IN_ORDER(q, s) \
  (flight[SLOT(me, q, s)] == DELIVERED && SEQUENCE(q, s) == RAISED(NEXT(me), q))
#endif
#ifdef SPLIT_SIGNAL
#define SIGNAL(q, s) skip
#define LATE_SIGNAL(q, s) \
  :: d_step { flight[SLOT(me, q, s)] == DELIVERED && IN_ORDER(q, s) -> RAISE(q, s) }
#elif defined(WEAK_SIGNALS)
#define SIGNAL(q, s) RAISE(q, s)
#define LATE_SIGNAL(q, s)
#else /* this put may have been what later ones, delivered before it, were waiting for */
#define SIGNAL(q, s) \
  do \
  :: IN_ORDER(q, s) -> RAISE(q, s) \
  :: else -> \
     if \
     :: S > 1 && IN_ORDER(q, (s + 1) % S) -> RAISE(q, (s + 1) % S) \
     :: else -> break \
     fi \
  od
#define LATE_SIGNAL(q, s)
#endif

#define DELIVER(q, s) \
  :: d_step { \
       flight[SLOT(me, q, s)] == POSTED -> \
       x = SEQUENCE(q, s); \
       if \
       :: FROM_POOL(me, q) -> assert(done[me] < CALL_OF(q, x)); \
                              assert(OWN(me, q) || copied[AT(me, q)] > x) \
       :: else -> assert(slot[SLOT(me, q, x)] == x + 1) \
       fi; \
       assert(x < acked[AT(NEXT(me), q)] + S); \
       slot[SLOT(NEXT(me), q, x)] = x + 1; \
       flight[SLOT(me, q, s)] = DELIVERED; \
       SIGNAL(q, s); \
       x = 0 \
     } \
  LATE_SIGNAL(q, s)
#if S > 1
#define LINK(q) DELIVER(q, 0) DELIVER(q, 1)
#else
#define LINK(q) DELIVER(q, 0)
#endif

active [R] proctype Network() {
#define me (_pid - R)
  byte x;
end:
  do
     LINK(0)
     LINK(1)
#if R > 2
     LINK(2)
#endif
#if R > 3
     LINK(3)
#endif
  od
#undef me
}

/* Both ends agree when all is over. */
#define ENDS_AGREE(r, q) \
  (OWN(r, q) || (arr[AT(r, q)] == CALLS * N(q) && acked[AT(r, q)] == CALLS * N(q) && \
                 forwarded[AT((r + R - 1) % R, q)] == CALLS * N(q)))
#define LEFT(r, q) (done[q] == CALLS)

active proctype Judge() {
  ALL(LEFT, 0);
#ifndef RESET_ARRIVALS
  assert(ALL(ENDS_AGREE, 0) && ALL(ENDS_AGREE, 1));
#if R > 2
  assert(ALL(ENDS_AGREE, 2));
#endif
#endif
}

#if K > 1
active [R] proctype Column() {
#define me (_pid - 2 * R - 1)
end:
  do
  :: entry[me] < CALLS && done[me] >= entry[me] -> entry[me]++ /* its readers are finished */
  od
#undef me
}
#endif
