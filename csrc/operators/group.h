// How a thread group shares its queues among its turns.
//
// Owns `step_group`.  Invariant: a group tries every queue of its own before it pauses, starting at
// another one each time, so no queue waits for another (see [Note: why this cannot deadlock] in
// all_gather.h).
#pragma once
#include "rules.h"

#include "../fabric/fabric.h"

namespace megamuon {

// One turn of group `group` of `groups` over queues group, group + groups, ...; whether anything
// moved.
template <class Rules, class Operator>
MM_HD bool step_group(Operator& op, const Geometry& place, int group, int groups, int& turn) {
  const int mine = (place.nodes - group + groups - 1) / groups;
  bool moved = false;
  for (int i = 0; i < mine; ++i) {
    // The mutant: own queue first, and none after it until it is finished.
    const int offset = Rules::groups_do_not_block ? turn + i : i + place.node / groups;
    const int q = group + (offset % mine) * groups;
    moved |= op.step(q);
    if (!Rules::groups_do_not_block && !op.finished(q)) break;
  }
  ++turn;
  return moved;
}

template <class Operator>
MM_HD bool group_finished(const Operator& op, const Geometry& place, int group, int groups) {
  for (int q = group; q < place.nodes; q += groups) {
    if (!op.finished(q)) return false;
  }
  return true;
}

}  // namespace megamuon
