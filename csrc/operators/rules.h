// The rules whose breach the checkers must notice.
//
// Owns `Sound`: one constant per rule that keeps the operators correct.  Production code uses Sound
// and compiles to code without the switches; a mutant derives from it and breaks one rule, and a
// test shows that the simulation finds the breach (csrc/tests, tools/chaos.py).  The rules about
// delivery (O1, O2 of the fabric contract) are broken by the simulated fabric itself.
#pragma once

namespace megamuon {

struct Sound {
  // All-gather: a ring slot is given back when it has been multicast *and* its forward has read it.
  static constexpr bool acknowledge_after_forward = true;
  // Nothing is written into the pool of a place that has not entered the call.
  static constexpr bool multicast_waits_for_node = true;
  // A group turns to its other queues when one cannot move.
  static constexpr bool groups_do_not_block = true;
  // Each queue has its own slots and credit.
  static constexpr bool credit_per_queue = true;
  // Cursors and counters go on from call to call.
  static constexpr bool counters_persist = true;
  // A source is sent only when its owner has entered, that is, has written it.
  static constexpr bool source_waits_for_owner = true;
  // A sender counts acknowledgements before it writes a slot again.
  static constexpr bool slots_wait_for_acknowledgement = true;
  // A call is over when every column of the node has written its share.
  static constexpr bool leave_waits_for_node = true;
  // Reduce-scatter: an outbox slot is written again only when its last put has read it.
  static constexpr bool outbox_waits_for_put = true;
  // The slot of upstream is given back after it has been read.
  static constexpr bool acknowledge_after_read = true;
  // All gradients of the node are final before they are summed.
  static constexpr bool sum_waits_for_node = true;
  // Publish: flags carry the version, so that an old arrival is not taken for a new one.
  static constexpr bool flags_carry_version = true;
  // A place looks at every source in each turn: none waits for another.
  static constexpr bool sources_do_not_block = true;
  // A round is over when its puts have read the copies.
  static constexpr bool retire_waits_for_puts = true;
};

}  // namespace megamuon
