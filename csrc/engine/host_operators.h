// The operators of one rank over the host fabric: calls in, one step at a time.
//
// Owns the queue of calls of an operator, its tables and tickets.  Invariant: calls run one after
// another in the order in which they were made; a ticket is the number of a call.  Tested through
// the host library.
#pragma once
#include "../fabric/host.h"
#include "../operators/all_gather.h"
#include "../operators/config.h"
#include "../operators/group.h"
#include "../operators/publish.h"
#include "../operators/reduce_scatter.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace megamuon {

struct Call {
  int table = 0;
  u64 base = 0, window_base = 0;
  bool first = true;
  double divisor = 1;
};

class HostOperator {
 public:
  HostOperator(std::string name, const OperatorConfig& config, const Geometry& place,
               const ControlLayout& layout, std::vector<char*> control,
               std::vector<ControlHeader*> headers)
      : name_(std::move(name)),
        config_(config),
        place_(place),
        layout_(layout),
        headers_(headers),
        fabric_(place_, std::move(control), std::move(headers)) {}
  virtual ~HostOperator() = default;
  HostOperator(const HostOperator&) = delete;
  HostOperator& operator=(const HostOperator&) = delete;

  virtual bool step() = 0;       // whether anything moved
  virtual bool busy() const = 0;  // whether calls are outstanding
  virtual std::string describe() = 0;  // what it stands at
  virtual std::vector<u64> cursors() = 0;

  HostFabric& fabric() { return fabric_; }
  const OperatorConfig& config() const { return config_; }
  const Geometry& place() const { return place_; }
  const std::string& name() const { return name_; }
  // Which ranks the places are, for texts; `all`: the headers by rank of the engine.
  void name_ranks(const std::vector<ControlHeader*>& all) {
    ranks_.clear();
    for (ControlHeader* header : headers_) {
      ranks_.push_back(int(std::find(all.begin(), all.end(), header) - all.begin()));
    }
  }
  bool has_pool() const { return has_pool_; }
  void set_pool(std::vector<char*> bases) {
    fabric_.set_pool(std::move(bases));
    has_pool_ = true;
  }

 protected:
  std::string rank_at(int node, int column) const {
    const std::size_t index = std::size_t(node * place_.columns + column);
    return "rank " + (index < ranks_.size() ? std::to_string(ranks_[index]) : "unknown");
  }

  const std::string name_;
  const OperatorConfig config_;
  const Geometry place_;
  const ControlLayout layout_;
  const std::vector<ControlHeader*> headers_;  // of the places
  std::vector<int> ranks_;                     // the same
  HostFabric fabric_;
  bool has_pool_ = false;
};

// AllGatherV and ReduceScatterV: what differs is how a call begins.
template <class Machine>
class CollectiveOperator : public HostOperator {
 public:
  template <class... Arguments>
  explicit CollectiveOperator(Arguments&&... arguments)
      : HostOperator(std::forward<Arguments>(arguments)...),
        machine_(fabric_, layout_, place_),
        queues_(place_.nodes) {}

  int add_table(GroupTable table) {
    tables_.push_back(std::move(table));
    return int(tables_.size()) - 1;
  }
  bool has_table(int table) const { return table >= 0 && table < int(tables_.size()); }

  int64_t submit(const Call& call) {
    calls_.push_back(call);
    return ++submitted_;
  }
  bool done(int64_t ticket) const { return completed_ >= ticket; }
  bool knows(int64_t ticket) const { return ticket >= 1 && ticket <= submitted_; }

  bool busy() const override { return !calls_.empty(); }

  bool step() override {
    bool moved = fabric_.poll();
    if (calls_.empty()) return moved;
    if (!running_) {
      start(calls_.front());
      moved = true;
    }
    if (!leaving_) {
      bool finished = true;
      for (int group = 0; group < groups_; ++group) {
        moved |= step_group<Sound>(machine_, place_, group, groups_, turns_[group]);
        finished = finished && group_finished(machine_, place_, group, groups_);
      }
      if (!finished) return moved;
      for (int group = 0; group < groups_; ++group) machine_.end_group(group, groups_);
      machine_.leave();
      leaving_ = moved = true;
    }
    if (!machine_.left()) return moved;
    calls_.pop_front();
    ++completed_;
    running_ = leaving_ = false;
    return true;
  }

  std::string describe() override {
    if (calls_.empty()) return name_ + ": idle";
    const GroupTable& table = tables_[calls_.front().table];
    std::string text = name_ + " of group '" + table.name + "', call " +
                       std::to_string(completed_ + 1);
    if (!running_) return text + ": not begun";
    const int column = machine_.missing(leaving_);
    if (leaving_) return text + ": waits for " + rank_at(place_.node, column) + " to finish";
    for (int q = 0; q < place_.nodes; ++q) {
      if (machine_.finished(q)) continue;
      const QueueState& s = queues_[q];
      text += ", queue " + std::to_string(q) + ": chunk " + std::to_string(s.delivered) + " of " +
              std::to_string(table.view().count(q)) + " (sequence " +
              std::to_string((q == place_.node ? s.sent : s.received) + s.delivered) + ")";
      break;
    }
    if (column >= 0) return text + " waits for " + rank_at(place_.node, column) + " to enter";
    text += " waits for " + rank_at(place_.previous(), place_.column);
    if (place_.previous() == place_.next()) return text;
    return text + " or " + rank_at(place_.next(), place_.column);
  }

  std::vector<u64> cursors() override {
    std::vector<u64> words;
    for (int q = 0; q < place_.nodes; ++q) {
      const QueueState& s = queues_[q];
      for (u64 word : {s.sent, fabric_.read(layout_.acknowledged(q)),
                       fabric_.read(layout_.arrived(q)), s.received}) {
        words.push_back(word);
      }
    }
    return words;
  }

 private:
  void start(const Call& call) {
    const GroupTable& table = tables_[call.table];
    groups_ = table.star ? 1 : std::min(config_.groups, place_.nodes);
    turns_.assign(groups_, 0);
    begin(table.view(), call);
    for (int group = 0; group < groups_; ++group) machine_.begin_group(group, groups_);
    machine_.enter();
    running_ = true;
  }

  void begin(const TableView& table, const Call& call);

  Machine machine_;
  std::vector<QueueState> queues_;
  std::deque<GroupTable> tables_;
  std::deque<Call> calls_;
  std::vector<int> turns_;
  int groups_ = 1;
  int64_t submitted_ = 0, completed_ = 0;
  bool running_ = false, leaving_ = false;
};

using HostAllGather = CollectiveOperator<AllGather<HostFabric>>;
using HostReduceScatter = CollectiveOperator<ReduceScatter<HostFabric>>;

template <>
inline void HostAllGather::begin(const TableView& table, const Call& call) {
  machine_.begin(table, call.base, u64(completed_) + 1, queues_.data());
}

template <>
inline void HostReduceScatter::begin(const TableView& table, const Call& call) {
  machine_.begin(table, call.base, call.window_base, call.first, call.divisor,
                 u64(completed_) + 1, queues_.data());
}

class HostPublish : public HostOperator {
 public:
  template <class... Arguments>
  explicit HostPublish(Arguments&&... arguments)
      : HostOperator(std::forward<Arguments>(arguments)...) {}

  void set_parameters(std::vector<PublishParameter> parameters, std::vector<std::string> names) {
    parameters_ = std::move(parameters);
    names_ = std::move(names);
    states_.assign(parameters_.size(), PublishState{});
    sources_.assign(place_.nodes, PublishSource{});
    machine_ = std::make_unique<Publish<HostFabric>>(fabric_, layout_, place_, parameters_.data(),
                                                     states_.data(), sources_.data(),
                                                     config_.tile_bytes);
  }

  bool ready() const { return machine_ != nullptr; }
  int parameters() const { return int(parameters_.size()); }
  bool owns(int p) const { return parameters_[p].node == place_.node; }
  const std::string& parameter_name(int p) const { return names_[p]; }
  u64 version(int p) const { return states_[p].version; }
  bool round_done() const { return !machine_ || machine_->finished(); }

  // Opens a round; the caller has checked the order.
  void open(const int* order, int count, u64 version) {
    order_.assign(order, order + count);
    handed_.assign(parameters_.size(), 1);
    for (int p : order_) handed_[p] = 0;
    machine_->begin(order_.data(), count, version);
  }

  // False where the parameter is not in the round, or was handed over before.
  bool hand_over(int p) {
    if (handed_.empty() || handed_[p]) return false;
    handed_[p] = 1;
    fabric_.store_own(layout_.task(tail_ % u64(layout_.parameters)), u64(p));
    fabric_.store_own(layout_.task_tail(), ++tail_);
    return true;
  }

  u64 arrived(int p) const { return fabric_.read(layout_.parameter_flag(p)); }

  bool busy() const override { return !round_done(); }
  bool step() override {
    const bool moved = fabric_.poll();
    return (machine_ && machine_->step()) || moved;
  }

  std::string describe() override {
    const int p = machine_ ? machine_->open_parameter() : -1;
    if (p < 0) return name_ + ": idle";
    const PublishState& s = states_[p];
    std::string text = name_ + " of '" + names_[p] + "', version " + std::to_string(s.version) +
                       ": tile " + std::to_string(s.tiles_seen) + " waits for ";
    if (!owns(p)) {
      return text + rank_at(place_.previous(), place_.column) + " (its owner is " +
             rank_at(parameters_[p].node, place_.column) + ")";
    }
    return text + (handed_[p] ? "its sends" : "its update on " + rank_at(place_.node, place_.column));
  }

  std::vector<u64> cursors() override {
    std::vector<u64> words;
    for (int p = 0; p < parameters(); ++p) words.push_back(arrived(p));
    return words;
  }

 private:
  std::vector<PublishParameter> parameters_;
  std::vector<std::string> names_;
  std::vector<PublishState> states_;
  std::vector<PublishSource> sources_;
  std::vector<int> order_;
  std::vector<char> handed_;
  u64 tail_ = 0;
  std::unique_ptr<Publish<HostFabric>> machine_;
};

}  // namespace megamuon
