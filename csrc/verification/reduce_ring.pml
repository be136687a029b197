/* Queue rings of ReduceScatterV: no deadlock, no outbox rewritten under a put, no slot lost.
 *
 * Owns: the rules of a chain that adds up one owner's chunks over the nodes of a rail: node q+1
 * begins, every node adds its own gradients to what arrived and puts the sum from an outbox into
 * the next node's ring, the owner q ends. Ring slots are acked once read; outbox slots are reused
 * after put_done; counters are never reset, and calls follow each other without a drain.
 * Bounds: R=3 nodes, K columns (1 or 2), N(q) chunks for owner q in a call, S ring slots and OUT
 * outbox slots for each queue, CALLS calls.
 *
 * A put is a message of its own. The network reads the outbox when it delivers and may read it
 * again (a repeated transmission) until put_done, which is a step of its own; both reads assert the
 * sequence number + 1 that the slot must hold. The node writes the outbox before it has a credit.
 * Abstracted: puts of a queue arrive in order (queue_ring.pml has the other orders); acks arrive at
 * once; a node takes any enabled step of any queue, which covers all groups and rotations; values
 * are sequence numbers, since the order of additions is fixed by the chain. Column 1 is a stream
 * whose gradients are final at its entry and are freed once its node is done with the call.
 *
 * Macros that change the model; tools/verify_models.py lists them with what must be found:
 *   OUTBOX_REUSED    an outbox slot is written before the put from it is done
 *   ACK_BEFORE_READ  a ring slot is acked when its chunk has arrived, not when it was read
 *   NO_ENTRY_WAIT    gradients are added before the other column has entered
 *   NO_DONE_WAIT     the other column frees its gradients without waiting for its node
 *   ONE_HEAVY        sound: owner 0 has C chunks, the others one
 *
 * States stored (spin 6.5.2, defaults K=1 C=2 S=1 OUT=1 CALLS=2): 478083; OUT=2 C=1 532924;
 * K=2 C=1 246988. ONE_HEAVY: S=2 104672, S=2 OUT=2 2143136. Until the breach: OUTBOX_REUSED 205,
 * ACK_BEFORE_READ 106, NO_ENTRY_WAIT K=2 24820, NO_DONE_WAIT K=2 26.
 */

#define R 3
#ifndef K
#define K 1
#endif
#ifndef S
#define S 1
#endif
#ifndef OUT
#define OUT 1
#endif
#ifndef C
#define C 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#if OUT > 2
#error "OUT is 1 or 2"
#endif

#define IDLE 0
#define POSTED 1
#define DELIVERED 2

#ifdef ONE_HEAVY
#define N(q) ((q) == 0 -> C : 1)
#else
#define N(q) C
#endif

#define NEXT(r) (((r) + 1) % R)
#define OWNER(r, q) ((r) == (q))
#define FIRST(r, q) ((r) == NEXT(q))
#define AT(r, q) ((r) * R + (q))
#define SLOT(r, q, x) (((r) * R + (q)) * S + (x) % S)
#define BOX(r, q, x) (((r) * R + (q)) * OUT + (x) % OUT)

byte call[R]; /* entry of column 0: the call that the node is in, or was in last */
byte done[R];
byte reduced[R * R]; /* cursors by node and owner, over all calls */
byte posted[R * R];
byte acked[R * R]; /* also the counter that the upstream node reads */
byte arr[R * R];
byte slot[R * R * S];
byte outbox[R * R * OUT];
byte flight[R * R * OUT]; /* the put that was posted last from an outbox slot */
#if K > 1
byte entry[R]; /* of column 1: its gradients of this call are final */
byte freed[R]; /* and those of this call are freed */
#endif

#if K > 1 && !defined(NO_ENTRY_WAIT)
#define ALL_ENTERED(r) (entry[r] >= call[r])
#else
#define ALL_ENTERED(r) true
#endif
#if K > 1
#define GRADIENTS_LIVE(r) (entry[r] == call[r] && freed[r] < call[r])
#else
#define GRADIENTS_LIVE(r) true
#endif
#ifdef OUTBOX_REUSED
#define BOX_FREE(r, q, x) (posted[AT(r, q)] + OUT > (x)) /* its sum was posted: not more */
#else
#define BOX_FREE(r, q, x) (posted[AT(r, q)] + OUT > (x) && flight[BOX(r, q, x)] == IDLE)
#endif
#define RUNNING(r) (call[r] != done[r])
#define COMPLETE(r, q) \
  (reduced[AT(r, q)] == call[r] * N(q) && (OWNER(r, q) || posted[AT(r, q)] == call[r] * N(q)))
#define ALL(holds, r) (holds(r, 0) && holds(r, 1) && holds(r, 2))

#ifdef ACK_BEFORE_READ
#define ACK_WITH_READ(q) skip
#define ACK_ALONE(q) \
  :: d_step { RUNNING(me) && !FIRST(me, q) && acked[AT(me, q)] < arr[AT(me, q)] -> \
              acked[AT(me, q)]++ }
#else
#define ACK_WITH_READ(q) acked[AT(me, q)]++
#define ACK_ALONE(q)
#endif

/* The steps of a group for one queue; `me` is the node. */
#define STEPS(q) \
  :: d_step { /* add: gradients, the chunk so far, and room for the sum */ \
       RUNNING(me) && reduced[AT(me, q)] < call[me] * N(q) && ALL_ENTERED(me) && \
         (FIRST(me, q) || reduced[AT(me, q)] < arr[AT(me, q)]) && \
         (OWNER(me, q) || BOX_FREE(me, q, reduced[AT(me, q)])) -> \
       assert(GRADIENTS_LIVE(me)); \
       if \
       :: FIRST(me, q) -> skip \
       :: else -> \
          assert(slot[SLOT(me, q, reduced[AT(me, q)])] == reduced[AT(me, q)] + 1); \
          ACK_WITH_READ(q) \
       fi; \
       if \
       :: OWNER(me, q) -> skip \
       :: else -> outbox[BOX(me, q, reduced[AT(me, q)])] = reduced[AT(me, q)] + 1 \
       fi; \
       reduced[AT(me, q)]++ \
     } \
  :: d_step { /* put the sum: a credit */ \
       RUNNING(me) && !OWNER(me, q) && posted[AT(me, q)] < reduced[AT(me, q)] && \
         posted[AT(me, q)] - acked[AT(NEXT(me), q)] < S && \
         flight[BOX(me, q, posted[AT(me, q)])] == IDLE -> \
       flight[BOX(me, q, posted[AT(me, q)])] = POSTED; \
       posted[AT(me, q)]++ \
     } \
  ACK_ALONE(q)

active [R] proctype Node() {
#define me _pid
end:
  do
  :: d_step { call[me] == done[me] && call[me] < CALLS -> call[me]++ }
     STEPS(0)
     STEPS(1)
     STEPS(2)
  :: d_step { RUNNING(me) && ALL(COMPLETE, me) -> done[me] = call[me] }
  od
#undef me
}

/* The put from outbox slot b was the last one posted from it. */
#define SEQUENCE(q, b) (posted[AT(me, q)] - 1 - (posted[AT(me, q)] - 1 - (b)) % OUT)
#define DELIVER(q, b) \
  :: d_step { \
       flight[BOX(me, q, b)] == POSTED && SEQUENCE(q, b) == arr[AT(NEXT(me), q)] -> \
       x = SEQUENCE(q, b); \
       assert(outbox[BOX(me, q, b)] == x + 1); \
       slot[SLOT(NEXT(me), q, x)] = x + 1; \
       flight[BOX(me, q, b)] = DELIVERED; \
       arr[AT(NEXT(me), q)]++; \
       x = 0 \
     } \
  :: d_step { \
       flight[BOX(me, q, b)] == DELIVERED -> \
       assert(outbox[BOX(me, q, b)] == SEQUENCE(q, b) + 1); \
       flight[BOX(me, q, b)] = IDLE \
     }
#if OUT > 1
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
     LINK(2)
  od
#undef me
}

#define LEFT(r, q) (done[q] == CALLS)
#define ENDS_AGREE(r, q) \
  (reduced[AT(r, q)] == CALLS * N(q) && \
   (FIRST(r, q) || (arr[AT(r, q)] == CALLS * N(q) && acked[AT(r, q)] == CALLS * N(q))))

active proctype Judge() {
  ALL(LEFT, 0);
  assert(ALL(ENDS_AGREE, 0) && ALL(ENDS_AGREE, 1) && ALL(ENDS_AGREE, 2))
}

#if K > 1
active [R] proctype Column() {
#define me (_pid - 2 * R - 1)
end:
  do
  :: entry[me] < CALLS && freed[me] == entry[me] -> entry[me]++
#ifdef NO_DONE_WAIT
  :: freed[me] < entry[me] -> freed[me]++
#else
  :: freed[me] < entry[me] && done[me] >= entry[me] -> freed[me]++
#endif
  od
#undef me
}
#endif
