// The operators as kernels: thread groups that step the same state machines as the host.
//
// Owns the launch of one call at one place (or at all places of a loopback): which block serves
// which queues, when a call is over, what is carried to the next one, what a failure leaves behind.
// Invariants: cursors and the count of finished groups are stored once per call and never reset; a
// group that waits looks at the abort word and the deadline; the last group of a seat leaves for
// all.  Source: DMuon-2, appendix C.2.  Compiled by `make device-compile`; checked on a GPU by
// tools/gpu_checks.sh.
//
// [Note: pipelines]
//
// A queue is served by one group, so a communicator of few nodes would use few blocks.  A call is
// therefore cut into P pipelines: each is the whole operator again, with its own control memory, on
// every P-th chunk of each queue (split_table).  P * G <= 16 blocks, G groups per pipeline.  A
// table that takes the star path uses one block: one group of pipeline 0.  Calls are counted alike
// in all pipelines, so an epoch may skip some.
//
// A *seat* is one pipeline of the operator at one place.
#pragma once
#include "all_gather.h"
#include "group.h"
#include "publish.h"
#include "reduce_scatter.h"

#include "../fabric/device_group.cuh"

// The operators are functions for the host too; fabrics of this file exist on the GPU alone.
#ifdef __CUDACC__
#pragma nv_diag_suppress 20011, 20012, 20013, 20014, 20015
#endif

namespace megamuon {

// What a seat carries from call to call, in the GPU's memory.
struct SeatState {
  QueueState queues[kMaxNodes];
  u64 arrivals;  // groups that have finished, over all calls
  u64 published_puts, published_tasks;
};

struct Seat {
  Geometry place;
  ControlLayout layout;
  TableView table;  // in the GPU's memory
  SeatState* state;
  int number;    // of the place, for reports
  int pipeline;
};

struct Call {
  int operation;  // the operator's number, and its table's
  int table;
  int groups;     // G, of each seat
  u64 epoch;
  u64 arrivals_before, later_arrivals_before;  // of a seat of pipeline 0, and of the others
  u64 base, window_base;
  double divisor;
  bool first;
};

// What a block keeps in shared memory.  The seat is copied there because the leader reads it at
// every turn, and what it reads of the GPU's memory after an acquire comes from the second-level
// cache.
struct Workspace {
  Group group;
  alignas(16) unsigned char seat_memory[sizeof(Seat)];
  u64 first[kMaxNodes + 1];
  alignas(16) unsigned char source_memory[kMaxNodes * sizeof(PublishSource)];

  __device__ PublishSource* sources() { return reinterpret_cast<PublishSource*>(source_memory); }
  __device__ const Seat& seat() const { return *reinterpret_cast<const Seat*>(seat_memory); }

  // All threads of the block, before they part; Group::run has the barrier that follows.
  __device__ void take(const Seat& from) {
    if (threadIdx.x != 0) return;
    Seat* own = reinterpret_cast<Seat*>(seat_memory);
    *own = from;
    if (from.table.first == nullptr) return;
    for (int q = 0; q <= from.place.nodes; ++q) first[q] = from.table.first[q];
    own->table.first = first;
  }
};

// Chunks i of each queue with i % pipelines == pipeline.
inline GroupTable split_table(const GroupTable& table, int pipelines, int pipeline) {
  GroupTable part = table;
  part.chunks.clear();
  for (std::size_t q = 0; q + 1 < table.first.size(); ++q) {
    part.first[q] = part.chunks.size();
    if (table.star && pipeline > 0) continue;
    const u64 step = table.star ? 1 : u64(pipelines);
    const u64 start = table.first[q] + u64(table.star ? 0 : pipeline);
    for (u64 i = start; i < table.first[q + 1]; i += step) {
      part.chunks.push_back(table.chunks[i]);
    }
  }
  part.first.back() = part.chunks.size();
  return part;
}

// --- one group -----------------------------------------------------------------------------------

// What a queue that stands still is waiting for; the words are read again, for the report alone.
template <class Fabric>
__device__ void diagnose(Fabric& fabric, const Seat& seat, const QueueState& s, bool reduces,
                         Failure& failure) {
  const ControlLayout& layout = seat.layout;
  const int q = failure.queue, nodes = seat.place.nodes;
  const bool own = q == seat.place.node;
  const u64 count = seat.table.count(q);
  failure.count = count, failure.delivered = s.delivered, failure.forwarded = s.forwarded;
  failure.acknowledged = s.acknowledged;
  const bool star = seat.table.star;
  // All-gather: queue q brings chunks unless it is the own one.  Reduction: the own one finishes
  // what arrives.
  const bool receives =
      nodes > 1 && (reduces ? own || (!star && seat.place.previous() != q) : !own);
  if (receives && !(star && own)) {
    failure.arrived = star ? fabric.read(layout.star_arrived(q)) - s.star_received
                           : fabric.read(layout.arrived(q)) - s.received;
  }
  const bool sends = nodes > 1 && (reduces ? !own : seat.place.next() != q);
  const u64 sent = reduces ? s.delivered : s.forwarded;
  if (sends && !star) failure.credit_used = s.sent + sent - fabric.read(layout.acknowledged(q));
  if (star && sends && !own) {
    failure.credit_used = s.star_sent + s.star_forwarded - fabric.read(layout.star_acknowledged(q));
  }
  if (failure.column >= 0) {
    failure.waits_for = Wait::entry;
  } else if (receives && s.delivered < count && failure.arrived <= s.delivered) {
    failure.waits_for = Wait::arrival;
  } else if (sends && sent < count && failure.credit_used >= u64(layout.slots)) {
    failure.waits_for = Wait::credit;
  } else {
    failure.waits_for = Wait::put;
  }
}

// The call of one group.  `reduces`: for the report.
template <class Fabric, class Operator>
__device__ void serve_queues(Fabric& fabric, Operator& op, const Seat& seat, const Call& call,
                             int group, const Watch& watch, QueueState* queues, bool reduces) {
  const int groups = call.groups, nodes = seat.place.nodes;
  Patience patience(watch);
  Failure failure{};
  failure.operation = call.operation, failure.table = call.table, failure.epoch = call.epoch;
  failure.place = seat.number, failure.group = group, failure.queue = -1, failure.column = -1;

  op.begin_group(group, groups);
  if (group == 0) op.enter();
  int turn = 0;
  while (!group_finished(op, seat.place, group, groups)) {
    if (step_group<Sound>(op, seat.place, group, groups, turn)) {
      patience.moved();
    } else if (!patience.wait()) {
      if (!patience.first_to_fail()) return;
      int q = group;
      while (q + groups < nodes && op.finished(q)) q += groups;
      failure.queue = q, failure.column = op.missing(false);
      diagnose(fabric, seat, queues[q], reduces, failure);
      patience.report(failure);
      return;
    }
  }
  op.end_group(group, groups);
  for (int q = group; q < nodes; q += groups) seat.state->queues[q] = queues[q];

  // What this group did comes before what the last group says, whichever it is.
  fence_system();
  const u64 before = atomicAdd(reinterpret_cast<unsigned long long*>(&seat.state->arrivals), 1ull);
  const u64 expected = seat.pipeline == 0 ? call.arrivals_before : call.later_arrivals_before;
  if (before + 1 != expected + u64(groups)) return;
  fence_system();
  op.leave();
  patience.moved();
  while (!op.left()) {
    if (patience.wait()) continue;
    if (!patience.first_to_fail()) return;
    failure.waits_for = Wait::leave, failure.column = op.missing(true);
    patience.report(failure);
    return;
  }
}

// The cursors of the queues of a group, from the GPU's memory to the group's.
__device__ __forceinline__ QueueState* load_queues(const Seat& seat, Group& memory, int group,
                                                   int groups) {
  QueueState* queues = memory.queues();
  for (int q = group; q < seat.place.nodes; q += groups) queues[q] = seat.state->queues[q];
  return queues;
}

// --- kernels -------------------------------------------------------------------------------------
// A Site says for a block: const Seat& seat(block), int group(block), Fabric fabric(block, place,
// group number, group); `place` is the seat's, in shared memory.

template <class Site>
__global__ void __launch_bounds__(kThreads)
    all_gather_kernel(const __grid_constant__ Site site, const __grid_constant__ Call call) {
  MM_SHARED(Workspace, space);
  space.take(site.seat(blockIdx.x));
  const Seat& seat = space.seat();
  const int group = site.group(blockIdx.x);
  auto fabric = site.fabric(blockIdx.x, seat.place, group, space.group);
  using Fabric = decltype(fabric);
  space.group.run(
      [&] {
        QueueState* queues = load_queues(seat, space.group, group, call.groups);
        AllGather<Fabric> op(fabric, seat.layout, seat.place);
        op.begin(seat.table, call.base, call.epoch, queues);
        serve_queues(fabric, op, seat, call, group, site.watch, queues, false);
        fabric.end();
      },
      [&](const Order& order, int worker) { fabric.template work<false>(order, worker); });
}

template <class Site>
__global__ void __launch_bounds__(kThreads)
    reduce_scatter_kernel(const __grid_constant__ Site site, const __grid_constant__ Call call) {
  MM_SHARED(Workspace, space);
  space.take(site.seat(blockIdx.x));
  const Seat& seat = space.seat();
  const int group = site.group(blockIdx.x);
  auto fabric = site.fabric(blockIdx.x, seat.place, group, space.group);
  using Fabric = decltype(fabric);
  space.group.run(
      [&] {
        QueueState* queues = load_queues(seat, space.group, group, call.groups);
        ReduceScatter<Fabric> op(fabric, seat.layout, seat.place);
        op.begin(seat.table, call.base, call.window_base, call.first, call.divisor, call.epoch,
                 queues);
        serve_queues(fabric, op, seat, call, group, site.watch, queues, true);
        fabric.end();
      },
      [&](const Order& order, int worker) { fabric.template work<true>(order, worker); });
}

// --- publish -------------------------------------------------------------------------------------

struct Round {
  int operation;
  const PublishParameter* parameters;
  PublishState* states;  // by place, `state_stride` apart
  u64 state_stride;
  const int* order;
  int count;
  u64 version, tile_bytes;
};

// One round at one place, one block.
template <class Site>
__global__ void __launch_bounds__(kThreads)
    publish_kernel(const __grid_constant__ Site site, const __grid_constant__ Round round) {
  MM_SHARED(Workspace, space);
  space.take(site.seat(blockIdx.x));
  const Seat& seat = space.seat();
  auto fabric = site.fabric(blockIdx.x, seat.place, 0, space.group);
  using Fabric = decltype(fabric);
  space.group.run(
      [&] {
        PublishState* states = round.states + seat.number * round.state_stride;
        Publish<Fabric> op(fabric, seat.layout, seat.place, round.parameters, states,
                           space.sources(), round.tile_bytes);
        op.resume(seat.state->published_puts, seat.state->published_tasks);
        op.begin(round.order, round.count, round.version);
        Patience patience(site.watch);
        while (!op.finished()) {
          if (op.step()) {
            patience.moved();
          } else if (!patience.wait()) {
            if (patience.first_to_fail()) {
              const int p = op.open_parameter();
              Failure failure{};
              failure.operation = round.operation, failure.table = p, failure.epoch = round.version;
              failure.place = seat.number, failure.queue = 0, failure.column = -1;
              failure.delivered = states[p].tiles_seen;
              failure.count =
                  (round.parameters[p].bytes + round.tile_bytes - 1) / round.tile_bytes;
              const bool own = round.parameters[p].node == seat.place.node;
              failure.waits_for = states[p].finished ? Wait::put : own ? Wait::task : Wait::arrival;
              patience.report(failure);
            }
            break;
          }
        }
        seat.state->published_puts = op.puts();
        seat.state->published_tasks = op.tasks();
        fabric.end();
      },
      [&](const Order& order, int worker) { fabric.template work<false>(order, worker); });
}

// A task of an own parameter, in the order of a stream: what the stream wrote before is what gets
// sent.
static __global__ void publish_task_kernel(char* control, ControlLayout layout, u64 index,
                                           int parameter) {
  store_word(control + layout.task(index % u64(layout.parameters)), u64(parameter));
  fence_system();
  store_word(control + layout.task_tail(), index + 1);
}

// Part of what a stream waits for; a launch carries it, so nothing has to be allocated or copied
// for it.
struct WaitList {
  static constexpr int kMost = 64;
  int operation, place, count;
  int which[kMost];
  u64 version[kMost];
};

// Holds a stream until each parameter of the list has arrived in its version.  One thread.
[[maybe_unused]] static __global__ void publish_wait_kernel(const char* control,
                                           const __grid_constant__ ControlLayout layout,
                                           const __grid_constant__ WaitList list,
                                           const __grid_constant__ Watch watch) {
  Patience patience(watch);
  for (int i = 0; i < list.count;) {
    const u64 seen = load_acquire(control + layout.parameter_flag(list.which[i]));
    if (seen >= list.version[i]) {
      ++i;
      patience.moved();
    } else if (!patience.wait()) {
      if (!patience.first_to_fail()) return;
      Failure failure{};
      failure.operation = list.operation, failure.table = list.which[i], failure.place = list.place;
      failure.queue = -1, failure.column = -1;
      failure.epoch = list.version[i], failure.delivered = seen;
      failure.waits_for = Wait::arrival;
      patience.report(failure);
      return;
    }
  }
}

// Why a kernel gave up, for people.  `operation` and `table`: the names of what the numbers stand
// for.
inline std::string describe(const Failure& f, const std::string& operation,
                            const std::string& table) {
  static const char* const kWaits[] = {"nothing",         "a place of the node to enter",
                                       "data to arrive",  "a free ring slot",
                                       "a put to finish", "a place of the node to leave",
                                       "an own parameter to be handed over"};
  std::string text = operation + ", " + table + ", place " + std::to_string(f.place) + ", epoch " +
                     std::to_string(f.epoch) +
                     (f.aborted ? ": aborted, waiting for " : ": no progress, waiting for ") +
                     kWaits[int(f.waits_for)];
  if (f.column >= 0) text += " (column " + std::to_string(f.column) + ")";
  if (f.queue >= 0) {
    text += "; group " + std::to_string(f.group) + ", queue " + std::to_string(f.queue) + ": " +
            std::to_string(f.delivered) + " of " + std::to_string(f.count) + " chunks delivered, " +
            std::to_string(f.forwarded) + " forwarded, " + std::to_string(f.acknowledged) +
            " acknowledged, " + std::to_string(f.arrived) + " arrived, " +
            std::to_string(f.credit_used) + " slots of credit in use";
  }
  return text;
}

}  // namespace megamuon
