// When the places of a node have entered and left a call.
//
// Owns the words by which the columns of a node tell each other the calls that they have come to.
// Invariant: a word holds the number of the last call that its column entered (or left), and only
// grows.  Base of AllGather and ReduceScatter; tested with them.
#pragma once
#include "../fabric/fabric.h"

namespace megamuon {

template <class Fabric>
class NodeEpoch {
 public:
  // Tell the node that this place has come to the call: what others may touch is ready for them.
  MM_HD void enter() { fabric_.set_row(layout_.entry(place_.column), epoch_); }

  // After all groups have ended: this place touches nothing of the others any more.
  MM_HD void leave() { fabric_.set_row(layout_.done(place_.column), epoch_); }

  // The column of this node that has not entered (or left) yet; -1 if all have.
  MM_HD int missing(bool leaving) {
    for (int k = 0; k < place_.columns; ++k) {
      if (fabric_.read(leaving ? layout_.done(k) : layout_.entry(k)) < epoch_) return k;
    }
    return -1;
  }

 protected:
  MM_HD NodeEpoch(Fabric& fabric, const ControlLayout& layout, const Geometry& place)
      : fabric_(fabric), layout_(layout), place_(place) {}

  MM_HD void begin_epoch(u64 epoch) {
    epoch_ = epoch;
    entered_ = left_ = false;
  }

  // Whether all columns have entered, and left; once true, nothing is read again in this call.
  MM_HD bool all_entered() { return entered_ || (entered_ = missing(false) < 0); }
  MM_HD bool all_left() { return left_ || (left_ = missing(true) < 0); }

  Fabric& fabric_;
  const ControlLayout& layout_;
  const Geometry& place_;
  u64 epoch_ = 0;
  bool entered_ = false, left_ = false;
};

}  // namespace megamuon
