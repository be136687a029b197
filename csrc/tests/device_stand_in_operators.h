// The operators of the stand-in for the device library, and what a fabric's handle holds.
//
// Owns what of device_operators.cuh is checked on the host: configurations, tables, the control
// memory that is asked for.  Invariants: what is refused there is refused here with the same text;
// a failure lasts; no call leaves the pool.  See device_stand_in.cpp.
#pragma once
#include "device_stand_in.h"

#include "bindings/entry.h"

namespace megamuon {
namespace stand_in {

constexpr double kForever = 1e8;  // seconds

// An operator, and what its calls are checked against.
struct Entry {
  struct Table {
    std::string name;
    u64 end, window_end;  // bytes from a call's base and window base
  };
  HostOperator* op = nullptr;
  std::vector<Table> tables;
  std::atomic<int64_t> calls{0};
  u64 version = 0;
  std::vector<int> handed;  // own parameters, since the last round began
  const OperatorConfig& config() const { return op->config(); }
  const std::string& name() const { return op->name(); }
  HostPublish& publish() const { return static_cast<HostPublish&>(*op); }
};

}  // namespace stand_in
}  // namespace megamuon

struct mmd_fabric {
  mmd_fabric(const void* id, const megamuon::stand_in::Options& options)
      : fabric(static_cast<const unsigned char*>(id), options) {}

  // Run `body` unless this rank has failed; what it throws becomes -1, and the first failure's
  // text.  Not under the mutex: a call may wait, and mmd_error is for those who watch it.
  template <class Body>
  int attempt(Body body) {
    if (!failure().empty()) return -1;
    try {
      return body();
    } catch (const std::exception& thrown) {
      const std::lock_guard<std::mutex> hold(mutex);
      if (text.empty()) text = thrown.what();
      return -1;
    }
  }

  // A refused table is no failure.
  template <class Body>
  int table(Body body) {
    return attempt([&] {
      try {
        return body();
      } catch (const std::exception& thrown) {
        const std::lock_guard<std::mutex> hold(mutex);
        refused = thrown.what();
        return -1;
      }
    });
  }

  std::string failure() {
    const std::lock_guard<std::mutex> hold(mutex);
    if (!text.empty()) return text;
    if (fabric.opened()) return fabric.engine().failure();
    return aborted ? "the device operators were aborted" : "";
  }

  // Null where there is no such operator.
  megamuon::stand_in::Entry* entry(int op) {
    const std::lock_guard<std::mutex> hold(mutex);
    return op >= 0 && op < int(operators.size()) ? &operators[op] : nullptr;
  }

  megamuon::stand_in::Entry& find(int op, int kind) {
    megamuon::stand_in::Entry* found = entry(op);
    if (found == nullptr || found->config().kind != kind) {
      throw std::runtime_error("there is no such operator of this kind: " + std::to_string(op));
    }
    return *found;
  }

  // A publish with its parameters, of which there must be `which`.
  megamuon::stand_in::Entry& find_publish(int op, int count, const int* which) {
    megamuon::stand_in::Entry& found = find(op, megamuon::kPublish);
    if (!found.publish().ready()) {
      throw std::runtime_error(found.name() + ": its parameters are not set");
    }
    for (int i = 0; i < count; ++i) {
      if (which[i] >= 0 && which[i] < found.publish().parameters()) continue;
      throw std::runtime_error(found.name() + ": no parameter " + std::to_string(which[i]));
    }
    return found;
  }

  megamuon::stand_in::Fabric fabric;
  std::deque<megamuon::stand_in::Entry> operators;  // grows, and its entries stay where they are
  std::string text, refused;
  std::atomic<bool> aborted{false};
  std::mutex mutex;  // over texts and the growth of `operators`
};

namespace megamuon {
namespace stand_in {

inline void check_operator(const mmd_fabric& handle, const OperatorConfig& c,
                           const std::string& name) {
  const Fabric& fabric = handle.fabric;
  const Options& options = fabric.options();
  if (!fabric.opened()) throw std::runtime_error("operator " + name + ": open the windows first");
  check_device_config(c, {options.nodes, options.columns, 0, 0}, int(handle.operators.size()),
                      options.operators, name);
  const int blocks = std::min(c.groups, options.blocks);
  check_control_end(c.control_offset + device_control_bytes(c, blocks), fabric.control_bytes(),
                    name);
}

inline std::unique_ptr<HostOperator> make_operator(Fabric& fabric,
                                            const OperatorConfig& config, const char* name) {
  std::vector<char*> control;
  std::vector<ControlHeader*> headers;
  for (int rank = 0; rank < fabric.ranks(); ++rank) {
    control.push_back(fabric.operator_control(rank) + config.control_offset);
    headers.push_back(fabric.engine().header(rank));
  }
  const int rank = fabric.options().rank;
  const Geometry place{config.nodes, config.columns, rank / config.columns, rank % config.columns};
  const ControlLayout layout = layout_of(config);
  OperatorConfig kept = config;
  kept.control_offset = Fabric::kOperators + config.control_offset;
  kept.groups = std::max(1, std::min({config.groups, fabric.options().blocks, kMaxBlocks}));
  std::unique_ptr<HostOperator> made;
  if (config.kind == kAllGather) {
    made = std::make_unique<HostAllGather>(name, kept, place, layout, control, headers);
  } else if (config.kind == kReduceScatter) {
    made = std::make_unique<HostReduceScatter>(name, kept, place, layout, control, headers);
  } else {
    made = std::make_unique<HostPublish>(name, kept, place, layout, control, headers);
  }
  made->set_pool(fabric.pools());
  return made;
}

// `unit` and `window`: bytes of a length and of a place in the window; what a call may reach.
inline Entry::Table check_segments(const Fabric& fabric, const std::string& op,
                            const std::vector<Segment>& segments, u64 unit, u64 window,
                            const std::string& name) {
  const Geometry place{fabric.options().nodes, fabric.options().columns, 0, 0};
  check_device_segments(segments, place, unit, window, fabric.capability().multimem,
                        op + ", " + name);
  Entry::Table table{name, 0, 0};
  for (const Segment& s : segments) {
    table.end = std::max(table.end, (s.offset + s.length) * unit);
    if (window > 0) table.window_end = std::max(table.window_end, (s.window + s.length) * window);
  }
  return table;
}

template <class Operator>
int add_table(mmd_fabric* handle, Entry& entry, GroupTable built, Entry::Table table) {
  return handle->fabric.engine().look([&] {
    entry.tables.push_back(std::move(table));
    return static_cast<Operator*>(entry.op)->add_table(std::move(built));
  });
}

inline void require_inside(const mmd_fabric* handle, const std::string& what, u64 end) {
  if (end <= handle->fabric.pool_bytes()) return;
  throw std::runtime_error(what + " ends at " + std::to_string(end) + ", and the pool has " +
                           std::to_string(handle->fabric.pool_bytes()) + " bytes");
}

template <class Operator>
int submit(mmd_fabric* handle, Entry& entry, const Call& call) {
  Engine& engine = handle->fabric.engine();
  const bool known = engine.look([&] {
    return call.table >= 0 && call.table < int(entry.tables.size());
  });
  if (!known) throw std::runtime_error(entry.name() + ": no such table");
  const Entry::Table table = engine.look([&] { return entry.tables[call.table]; });
  const std::string what = entry.name() + ", " + table.name;
  if (handle->fabric.capability().multimem && call.base % 16 != 0) {
    throw std::runtime_error(what + ": base " + std::to_string(call.base) +
                             " is no multiple of 16");
  }
  require_inside(handle, what, call.base + table.end);
  if (table.window_end > 0) {
    require_inside(handle, what + ": its window", call.window_base + table.window_end);
  }
  engine.change([&] {
    entry.calls = static_cast<Operator*>(entry.op)->submit(call);
    return 0;
  });
  return 0;
}

// 1, 0, or -1 where there is no such call.
inline int call_state(const Entry& entry, int64_t call) {
  if (entry.config().kind == kAllGather) {
    const auto& op = static_cast<const HostAllGather&>(*entry.op);
    return op.knows(call) ? int(op.done(call)) : -1;
  }
  if (entry.config().kind == kReduceScatter) {
    const auto& op = static_cast<const HostReduceScatter&>(*entry.op);
    return op.knows(call) ? int(op.done(call)) : -1;
  }
  return -1;
}

inline int arrived_count(const HostPublish& op, int count, const int* which, const u64* version) {
  int arrived = 0;
  for (int i = 0; i < count; ++i) arrived += op.arrived(which[i]) >= version[i];
  return arrived;
}

// As on the GPU: exactly the own parameters of the round have been.
inline void require_handed_over(const Entry& entry, int count, const int* order) {
  const HostPublish& publish = entry.publish();
  std::vector<char> awaited(publish.parameters(), 0), handed(publish.parameters(), 0);
  for (int i = 0; i < count; ++i) awaited[order[i]] = publish.owns(order[i]);
  for (const int p : entry.handed) handed[p] = 1;
  for (int p = 0; p < publish.parameters(); ++p) {
    if (handed[p] == awaited[p]) continue;
    throw std::runtime_error(entry.name() + " of '" + publish.parameter_name(p) + "': " +
                             (awaited[p] ? "hand it over before its round begins"
                                         : "handed over, but not in the round"));
  }
}

// As the kernel that holds a stream: it gives up when nothing of the list arrives for a deadline.
inline int wait_for_arrivals(mmd_fabric* handle, const Entry& entry, int count, const int* which,
                      const u64* version) {
  const HostPublish& op = entry.publish();
  const double deadline = handle->fabric.options().deadline_seconds;
  for (int before = -1;;) {
    const int found = arrived_count(op, count, which, version);
    if (found == count) return 0;
    if (found == before) break;
    before = found;
    const int state = handle->fabric.engine().wait(
        [&] { return arrived_count(op, count, which, version) > found; },
        deadline > 0 ? deadline : kForever);
    if (state < 0) return -1;
  }
  for (int i = 0; i < count; ++i) {
    const u64 seen = op.arrived(which[i]);
    if (seen >= version[i]) continue;
    const std::string text = op.name() + " of '" + op.parameter_name(which[i]) +
                             "': no progress, waiting for version " + std::to_string(version[i]) +
                             " after version " + std::to_string(seen);
    handle->fabric.engine().abort(text);
    throw std::runtime_error("rank " + std::to_string(handle->fabric.options().rank) + ": " + text);
  }
  return 0;
}

}  // namespace stand_in
}  // namespace megamuon
