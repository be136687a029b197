// The device library's C interface over host memory: ranks are processes of one machine.
//
// Owns the passage from the functions of device_api.h to the host's engine, so that what drives
// training through them is tested without GPUs.  Invariants: what device_api.h refuses is refused
// here, with -1 and a text, and a failure lasts; offsets that leave the pool are refused, where a
// GPU would write there.  What differs: a call starts at once and streams are ignored, so a caller
// waits with the functions mmd_stand_in_*; what holds a stream there (mmd_publish_wait, a round
// that is not over at mmd_publish_begin) holds the calling thread; mmd_abort ends the waits of all
// ranks.  MEGAMUON_STAND_IN_MULTIMEM=1: rows offer multimem, which only makes tables be refused.
// Compiled and tested by tests/collectives/test_device_stand_in.py.
#include "device_stand_in_operators.h"

#include <sys/random.h>

#include <numeric>

using namespace megamuon;
using namespace megamuon::stand_in;

extern "C" {

int mmd_code_version(void) { return MM_CODE_VERSION; }
int mmd_compiled_nccl(void) { return 22907; }
int mmd_loaded_nccl(char*, int) { return 22907; }

int mmd_unique_id(void* id, char* error, int error_size) {
  return guarded(error, error_size, [&] {
    if (getrandom(id, 128, 0) != 128) throw std::runtime_error("getrandom gave no 128 bytes");
    return 0;
  });
}

mmd_fabric* mmd_create(const void* id, int rank, int nodes, int columns, int, int operators,
                       int blocks, int multimem, double deadline_seconds, char* error,
                       int error_size) {
  mmd_fabric* made = nullptr;
  guarded(error, error_size, [&] {
    if (operators < 1 || blocks < 1 || blocks > kMaxBlocks) {
      throw std::runtime_error("operators must be at least 1, blocks 1 .. " +
                               std::to_string(kMaxBlocks));
    }
    if (nodes < 1 || columns < 1 || rank < 0 || rank >= nodes * columns) {
      throw std::runtime_error("rank " + std::to_string(rank) + " of a grid of " +
                               std::to_string(nodes) + " x " + std::to_string(columns));
    }
    made = new mmd_fabric(
        id, {rank, nodes, columns, operators, blocks, multimem != 0, deadline_seconds});
    return 0;
  });
  return made;
}

int mmd_query(mmd_fabric* handle, mmd_capability* out) {
  *out = handle->fabric.capability();
  return 0;
}

int mmd_open(mmd_fabric* handle, uint64_t control_bytes, uint64_t pool_bytes,
             mmd_fabric* pool_of) {
  return handle->attempt([&] {
    handle->fabric.open(control_bytes, pool_bytes,
                        pool_of == nullptr ? nullptr : &pool_of->fabric);
    return 0;
  });
}

uint64_t mmd_pool(mmd_fabric* handle) { return reinterpret_cast<uint64_t>(handle->fabric.pool()); }

int mmd_agree(mmd_fabric* handle, int* values, int count) {
  return handle->attempt([&] {
    handle->fabric.agree(values, count);
    return 0;
  });
}

void mmd_destroy(mmd_fabric* handle) { delete handle; }

uint64_t mmd_operator_control_bytes(int nodes, int columns, const mm_operator_config* config) {
  OperatorConfig given = config_of(*config);
  given.nodes = nodes, given.columns = columns;
  return device_control_bytes(given, given.groups);
}

int mmd_operator_create(mmd_fabric* handle, const mm_operator_config* config, const char* name) {
  return handle->attempt([&] {
    const OperatorConfig given = config_of(*config);
    check_operator(*handle, given, name);
    std::unique_ptr<HostOperator> made = make_operator(handle->fabric, given, name);
    HostOperator* op = made.get();
    std::vector<int> ranks(handle->fabric.ranks());
    std::iota(ranks.begin(), ranks.end(), 0);
    const int number = handle->fabric.engine().add(std::move(made), std::move(ranks));
    const std::lock_guard<std::mutex> hold(handle->mutex);
    handle->operators.emplace_back().op = op;
    return number;
  });
}

int mmd_all_gather_table(mmd_fabric* handle, int op, int segments, const int* node,
                         const int* column, const uint64_t* offset, const uint64_t* bytes,
                         const char* name) {
  return handle->table([&] {
    std::vector<Segment> list;
    for (int j = 0; j < segments; ++j) list.push_back({node[j], column[j], offset[j], bytes[j], 0});
    Entry& found = handle->find(op, MM_ALL_GATHER);
    Entry::Table table = check_segments(handle->fabric, found.name(), list, 1, 0, name);
    GroupTable built = operator_table(found.config(), found.op->place(), list, Dtype::f32,
                                      Dtype::f32, Dtype::f32, name);
    return add_table<HostAllGather>(handle, found, std::move(built), std::move(table));
  });
}

int mmd_reduce_scatter_table(mmd_fabric* handle, int op, int segments, const int* node,
                             const int* column, const uint64_t* offset, const uint64_t* elements,
                             const uint64_t* window, int slot_dtype, int wire_dtype,
                             int window_dtype, const char* name) {
  return handle->table([&] {
    const Dtype slot = Dtype(slot_dtype), wire = Dtype(wire_dtype), sum = Dtype(window_dtype);
    if (!is_dtype(slot_dtype) || !is_dtype(wire_dtype) || !is_dtype(window_dtype) ||
        !sum_supported(slot, wire, sum)) {
      throw std::runtime_error(std::string(name) + ": sums of these dtypes are not supported");
    }
    std::vector<Segment> list;
    for (int j = 0; j < segments; ++j) {
      list.push_back({node[j], column[j], offset[j], elements[j], window[j]});
    }
    Entry& found = handle->find(op, MM_REDUCE_SCATTER);
    Entry::Table table =
        check_segments(handle->fabric, found.name(), list, size_of(slot), size_of(sum), name);
    GroupTable built =
        operator_table(found.config(), found.op->place(), list, slot, wire, sum, name);
    return add_table<HostReduceScatter>(handle, found, std::move(built), std::move(table));
  });
}

int mmd_upload(mmd_fabric* handle) {
  return handle->attempt([&] { return 0; });  // tables are read where they were made
}

int mmd_all_gather(mmd_fabric* handle, int op, int table, uint64_t base, uint64_t) {
  return handle->attempt([&] {
    Call call;
    call.table = table, call.base = base;
    return submit<HostAllGather>(handle, handle->find(op, MM_ALL_GATHER), call);
  });
}

int mmd_reduce_scatter(mmd_fabric* handle, int op, int table, uint64_t base, uint64_t window_base,
                       int first, double divisor, uint64_t) {
  return handle->attempt([&] {
    Call call;
    call.table = table, call.base = base, call.window_base = window_base;
    call.first = first != 0, call.divisor = divisor;
    return submit<HostReduceScatter>(handle, handle->find(op, MM_REDUCE_SCATTER), call);
  });
}

// --- publish -------------------------------------------------------------------------------------

int mmd_publish_parameters(mmd_fabric* handle, int op, int parameters, const int* node,
                           const uint64_t* offset, const uint64_t* bytes,
                           const char* const* names) {
  return handle->attempt([&] {
    Entry& found = handle->find(op, MM_PUBLISH);
    const OperatorConfig& config = found.config();
    std::vector<PublishParameter> list;
    std::vector<std::string> texts;
    u64 tiles = 0;
    for (int p = 0; p < parameters; ++p) {
      const std::string what = found.name() + " of '" + names[p] + "'";
      if (node[p] < 0 || node[p] >= config.nodes) {
        throw std::runtime_error(what + ": owner node " + std::to_string(node[p]) +
                                 " is not in the grid");
      }
      require_inside(handle, what, offset[p] + bytes[p]);
      list.push_back({node[p], offset[p], bytes[p], tiles});
      texts.push_back(names[p]);
      tiles += (bytes[p] + config.tile_bytes - 1) / config.tile_bytes;
    }
    if (parameters > config.parameters || tiles > config.tiles) {
      throw std::runtime_error(found.name() + " was made for at most " +
                               std::to_string(config.parameters) + " parameters of " +
                               std::to_string(config.tiles) + " tiles, and these are " +
                               std::to_string(parameters) + " of " + std::to_string(tiles));
    }
    return handle->fabric.engine().look([&] {
      if (found.op->busy()) throw std::runtime_error(found.name() + ": a round is open");
      found.publish().set_parameters(std::move(list), std::move(texts));
      return 0;
    });
  });
}

int mmd_publish_begin(mmd_fabric* handle, int op, int parameters, const int* order,
                      uint64_t version, uint64_t) {
  return handle->attempt([&] {
    Entry& found = handle->find_publish(op, parameters, order);
    HostPublish& publish = found.publish();
    Engine& engine = handle->fabric.engine();
    if (engine.wait([&] { return publish.round_done(); }, kForever) != 0) return -1;
    if (version <= found.version) {
      throw std::runtime_error(found.name() + ": version " + std::to_string(version) +
                               " after version " + std::to_string(found.version));
    }
    require_handed_over(found, parameters, order);
    found.version = version;
    return engine.change([&] {
      publish.open(order, parameters, version);
      for (const int p : found.handed) publish.hand_over(p);
      found.handed.clear();
      return 0;
    });
  });
}

int mmd_publish_task(mmd_fabric* handle, int op, int parameter, uint64_t) {
  return handle->attempt([&] {
    Entry& found = handle->find_publish(op, 1, &parameter);
    HostPublish& publish = found.publish();
    const std::string what = found.name() + " of '" + publish.parameter_name(parameter) + "'";
    if (!publish.owns(parameter)) throw std::runtime_error(what + ": this rank does not own it");
    if (std::count(found.handed.begin(), found.handed.end(), parameter) > 0) {
      throw std::runtime_error(what + ": handed over before");
    }
    found.handed.push_back(parameter);
    return 0;
  });
}

int mmd_publish_wait(mmd_fabric* handle, int op, int parameters, const int* which,
                     const uint64_t* version, uint64_t) {
  return handle->attempt([&] {
    const Entry& found = handle->find_publish(op, parameters, which);
    return wait_for_arrivals(handle, found, parameters, which, version);
  });
}

// --- failure -------------------------------------------------------------------------------------

void mmd_abort(mmd_fabric* handle) {
  handle->aborted = true;
  handle->fabric.leave();
  if (handle->fabric.opened()) handle->fabric.engine().abort("the device operators were aborted");
}

int mmd_error(mmd_fabric* handle, char* text, int text_size) {
  const std::string found = handle->failure();
  if (!found.empty()) return copy_text(found, text, text_size);
  const std::lock_guard<std::mutex> hold(handle->mutex);
  const int length = copy_text(handle->refused, text, text_size);
  handle->refused.clear();
  return length;
}

// --- what a stream tells on a GPU ----------------------------------------------------------------

// Number of an operator's last call, from 1; 0 before the first; -1: there is no such operator, or
// it is a publish.
int64_t mmd_stand_in_calls(mmd_fabric* handle, int op) {
  const Entry* found = handle->entry(op);
  return found == nullptr || found->config().kind == MM_PUBLISH ? -1 : found->calls.load();
}

// 1: this rank's part of the call is over and its result in place; 0: not yet; -1: there is no such
// call, or the fabric failed before the call was over.
int mmd_stand_in_done(mmd_fabric* handle, int op, int64_t call) {
  const Entry* found = handle->entry(op);
  if (found == nullptr) return -1;
  const int state = handle->fabric.engine().look([&] { return call_state(*found, call); });
  return state == 0 && !handle->failure().empty() ? -1 : state;
}

// 0: the call is over; 1: `seconds` are; -1 as above.
int mmd_stand_in_wait(mmd_fabric* handle, int op, int64_t call, double seconds) {
  const Entry* found = handle->entry(op);
  if (found == nullptr) return -1;
  Engine& engine = handle->fabric.engine();
  if (engine.look([&] { return call_state(*found, call); }) < 0) return -1;
  return engine.wait([&] { return call_state(*found, call) == 1; }, std::min(seconds, kForever));
}

// Whether this rank's part of the last round of a publish is over: 1, before the first too; 0; -1:
// there is no such publish, or the fabric failed before the round was over.
int mmd_stand_in_round_done(mmd_fabric* handle, int op) {
  const Entry* found = handle->entry(op);
  if (found == nullptr || found->config().kind != MM_PUBLISH) return -1;
  const bool done =
      handle->fabric.engine().look([&] { return found->publish().round_done(); });
  return done ? 1 : handle->failure().empty() ? 0 : -1;
}

// 0: the round is over; 1: `seconds` are; -1 as above.
int mmd_stand_in_round_wait(mmd_fabric* handle, int op, double seconds) {
  const Entry* found = handle->entry(op);
  if (found == nullptr || found->config().kind != MM_PUBLISH) return -1;
  return handle->fabric.engine().wait([&] { return found->publish().round_done(); },
                                      std::min(seconds, kForever));
}

// 1: each parameter of `which` has arrived in its version or a later one; 0: not yet; -1: there is
// no such publish or parameter, or the fabric failed before they arrived.
int mmd_stand_in_arrived(mmd_fabric* handle, int op, int parameters, const int* which,
                         const uint64_t* version) {
  const Entry* found = handle->entry(op);
  if (found == nullptr || found->config().kind != MM_PUBLISH) return -1;
  const HostPublish& publish = found->publish();
  for (int i = 0; i < parameters; ++i) {
    if (which[i] < 0 || which[i] >= publish.parameters()) return -1;
  }
  if (arrived_count(publish, parameters, which, version) == parameters) return 1;
  return handle->failure().empty() ? 0 : -1;
}

}  // extern "C"
