// The C interface over the engine and the operators.  See host_api.h.
#include "host_api.h"

#include "../engine/engine_handle.h"
#include "../pool/segment.h"
#include "entry.h"

using megamuon::Call;
using megamuon::ControlHeader;
using megamuon::ControlLayout;
using megamuon::Dtype;
using megamuon::Engine;
using megamuon::Geometry;
using megamuon::HostAllGather;
using megamuon::HostOperator;
using megamuon::HostPublish;
using megamuon::HostReduceScatter;
using megamuon::Inside;
using megamuon::is_dtype;
using megamuon::OperatorConfig;
using megamuon::refuse;
using megamuon::Segment;
using megamuon::u64;

namespace {

constexpr int kMostNodes = 4096;

// What is wrong with a configuration; "" where nothing is.
std::string problem_of(const OperatorConfig& config) {
  if (config.kind < megamuon::kAllGather || config.kind > megamuon::kPublish) return "kind is not an operator";
  if (config.nodes < 1 || config.columns < 1 || config.nodes > kMostNodes) {
    return "a grid of " + std::to_string(config.nodes) + " nodes x " +
           std::to_string(config.columns) + " columns";
  }
  if (config.control_offset % 256) return "control_offset is no multiple of 256";
  if (config.kind == megamuon::kPublish) {
    if (config.columns != 1) return "a publish runs along one column";
    if (config.parameters < 0 || config.tile_bytes == 0) return "tile_bytes is 0";
    return "";
  }
  if (config.slots < 1 || config.slots > 64) {
    return "slots=" + std::to_string(config.slots) + ": choose 1 to 64";
  }
  if (config.chunk_bytes < 256 || config.chunk_bytes > (1u << 20) || config.chunk_bytes % 256) {
    return "chunk_bytes=" + std::to_string(config.chunk_bytes) +
           ": choose a multiple of 256 up to 1 MiB";
  }
  if (config.groups < 1) return "groups=" + std::to_string(config.groups) + ": choose 1 or more";
  return "";
}

std::string segment_problem(const Segment& s, const Geometry& place, int index) {
  if (s.node >= 0 && s.node < place.nodes && s.column >= 0 && s.column < place.columns) return "";
  return "segment " + std::to_string(index) + " is owned by node " + std::to_string(s.node) +
         ", column " + std::to_string(s.column) + ", outside " + std::to_string(place.nodes) +
         " x " + std::to_string(place.columns);
}

template <class Machine>
int64_t submit(mm_engine* handle, int op, const Call& call, const char* what) {
  const Inside inside(handle);
  auto* found = inside.find<Machine>(op);
  if (!found) return refuse(handle, std::string(what) + ": no such operator");
  if (!found->has_table(call.table)) return refuse(handle, std::string(what) + ": no such table");
  if (!found->has_pool()) return refuse(handle, std::string(what) + ": the operator has no pool");
  if (handle->engine->failed()) return -1;
  return handle->engine->change([&] { return found->submit(call); });
}

// Whether ticket `ticket` of operator `op` is over: 1, 0, or -1 where there is none.
int ticket_state(HostOperator* op, int64_t ticket) {
  if (auto* gather = dynamic_cast<HostAllGather*>(op)) {
    return gather->knows(ticket) ? int(gather->done(ticket)) : -1;
  }
  if (auto* reduction = dynamic_cast<HostReduceScatter*>(op)) {
    return reduction->knows(ticket) ? int(reduction->done(ticket)) : -1;
  }
  return -1;
}

HostPublish* publish_of(const Inside& inside, mm_engine* handle, int op) {
  auto* found = inside.find<HostPublish>(op);
  if (!found) {
    refuse(handle, "publish: no such operator");
    return nullptr;
  }
  if (!found->ready() || !found->has_pool()) {
    refuse(handle, "publish: its parameters or its pool are not set");
    return nullptr;
  }
  return found;
}

bool parameter_ok(mm_engine* handle, const HostPublish* op, int parameter) {
  if (parameter >= 0 && parameter < op->parameters()) return true;
  refuse(handle, "publish: parameter " + std::to_string(parameter) + " is outside 0.." +
                     std::to_string(op->parameters() - 1));
  return false;
}

}  // namespace

extern "C" {

int mm_code_version(void) { return MM_CODE_VERSION; }

void* mm_segment_create(const char* name, uint64_t bytes, char* error, int error_size) {
  std::string text;
  void* address = megamuon::segment_create(name, bytes, text);
  megamuon::copy_text(text, error, error_size);
  return address;
}

void* mm_segment_map(const char* name, uint64_t bytes, char* error, int error_size) {
  std::string text;
  void* address = megamuon::segment_map(name, bytes, text);
  megamuon::copy_text(text, error, error_size);
  return address;
}

int mm_segment_unlink(const char* name) { return -megamuon::segment_unlink(name); }

int mm_segment_unmap(void* address, uint64_t bytes) {
  return -megamuon::segment_unmap(address, bytes);
}

uint64_t mm_engine_control_bytes(void) { return sizeof(ControlHeader); }

mm_engine* mm_engine_create(int rank, int ranks, void* const* control, const int64_t* pids,
                            double deadline_seconds) {
  if (rank < 0 || rank >= ranks) return nullptr;
  std::vector<char*> bases;
  for (int i = 0; i < ranks; ++i) bases.push_back(static_cast<char*>(control[i]));
  auto* handle = new mm_engine;
  handle->engine = std::make_unique<Engine>(rank, std::move(bases),
                                            std::vector<int64_t>(pids, pids + ranks),
                                            deadline_seconds);
  return handle;
}

void mm_engine_destroy(mm_engine* handle) {
  if (handle != nullptr) megamuon::destroy(handle);
}

void mm_engine_abort(mm_engine* handle, const char* reason) {
  const Inside inside(handle);
  if (inside) handle->engine->abort(reason);
}

int mm_engine_error(mm_engine* handle, char* text, int text_size) {
  return megamuon::copy_text(megamuon::error_of(handle), text, text_size);
}

void mm_engine_set_link(mm_engine* handle, uint64_t latency_ns, double bytes_per_second) {
  const Inside inside(handle);
  if (inside) handle->engine->set_link({latency_ns, bytes_per_second});
}

uint64_t mm_operator_control_bytes(const mm_operator_config* config) {
  const OperatorConfig given = megamuon::config_of(*config);
  return problem_of(given).empty() ? control_stride(layout_of(given)) : 0;
}

int mm_operator_create(mm_engine* handle, const mm_operator_config* config, const char* name) {
  const Inside inside(handle);
  if (!inside) return -1;
  Engine& engine = *handle->engine;
  const OperatorConfig kept = megamuon::config_of(*config);
  const std::string problem = problem_of(kept);
  if (!problem.empty()) return refuse(handle, std::string(name) + ": " + problem);
  const int places = config->nodes * config->columns;
  std::vector<char*> control;
  std::vector<ControlHeader*> headers;
  int own = -1;
  for (int i = 0; i < places; ++i) {
    const int rank = config->ranks[i];
    if (rank < 0 || rank >= engine.ranks()) {
      return refuse(handle, std::string(name) + ": rank " + std::to_string(rank) + " is unknown");
    }
    if (rank == engine.rank()) own = i;
    control.push_back(engine.control(rank) + config->control_offset);
    headers.push_back(engine.header(rank));
  }
  if (own < 0) return refuse(handle, std::string(name) + ": this rank is not in the grid");
  const Geometry place{config->nodes, config->columns, own / config->columns,
                       own % config->columns};
  const ControlLayout layout = layout_of(kept);
  std::unique_ptr<HostOperator> made;
  if (config->kind == MM_ALL_GATHER) {
    made = std::make_unique<HostAllGather>(name, kept, place, layout, control, headers);
  } else if (config->kind == MM_REDUCE_SCATTER) {
    made = std::make_unique<HostReduceScatter>(name, kept, place, layout, control, headers);
  } else {
    made = std::make_unique<HostPublish>(name, kept, place, layout, control, headers);
  }
  return engine.add(std::move(made), std::vector<int>(config->ranks, config->ranks + places));
}

int mm_operator_set_pool(mm_engine* handle, int op, void* const* bases) {
  const Inside inside(handle);
  auto* found = inside.find<HostOperator>(op);
  if (!found) return refuse(handle, "set_pool: no such operator");
  const int places = found->place().nodes * found->place().columns;
  std::vector<char*> pool;
  for (int i = 0; i < places; ++i) pool.push_back(static_cast<char*>(bases[i]));
  return handle->engine->look([&] {
    if (found->busy()) return refuse(handle, found->name() + ": its pool is in use");
    found->set_pool(pool);
    return 0;
  });
}

int mm_all_gather_table(mm_engine* handle, int op, int segments, const int* node, const int* column,
                        const uint64_t* offset, const uint64_t* bytes, const char* name) {
  const Inside inside(handle);
  auto* found = inside.find<HostAllGather>(op);
  if (!found) return refuse(handle, "all_gather_table: no such operator");
  std::vector<Segment> list;
  for (int j = 0; j < segments; ++j) {
    list.push_back({node[j], column[j], offset[j], bytes[j], 0});
    const std::string problem = segment_problem(list.back(), found->place(), j);
    if (!problem.empty()) return refuse(handle, std::string(name) + ": " + problem);
  }
  auto table = megamuon::operator_table(found->config(), found->place(), list, Dtype::f32,
                                        Dtype::f32, Dtype::f32, name);
  return handle->engine->look([&] { return found->add_table(std::move(table)); });
}

int mm_reduce_scatter_table(mm_engine* handle, int op, int segments, const int* node,
                            const int* column, const uint64_t* offset, const uint64_t* elements,
                            const uint64_t* window, int slot_dtype, int wire_dtype,
                            int window_dtype, const char* name) {
  const Inside inside(handle);
  auto* found = inside.find<HostReduceScatter>(op);
  if (!found) return refuse(handle, "reduce_scatter_table: no such operator");
  if (!is_dtype(slot_dtype) || !is_dtype(wire_dtype) || !is_dtype(window_dtype)) {
    return refuse(handle, std::string(name) + ": unknown dtype");
  }
  const Dtype slot = Dtype(slot_dtype), wire = Dtype(wire_dtype), sum = Dtype(window_dtype);
  if (!megamuon::sum_supported(slot, wire, sum)) {
    return refuse(handle, std::string(name) + ": sums of these dtypes are not supported: slots " +
                              std::to_string(slot_dtype) + ", wire " + std::to_string(wire_dtype) +
                              ", window " + std::to_string(window_dtype));
  }
  std::vector<Segment> list;
  for (int j = 0; j < segments; ++j) {
    list.push_back({node[j], column[j], offset[j], elements[j], window[j]});
    const std::string problem = segment_problem(list.back(), found->place(), j);
    if (!problem.empty()) return refuse(handle, std::string(name) + ": " + problem);
  }
  auto table =
      megamuon::operator_table(found->config(), found->place(), list, slot, wire, sum, name);
  return handle->engine->look([&] { return found->add_table(std::move(table)); });
}

int64_t mm_all_gather(mm_engine* handle, int op, int table, uint64_t base) {
  Call call;
  call.table = table, call.base = base;
  return submit<HostAllGather>(handle, op, call, "all_gather");
}

int64_t mm_reduce_scatter(mm_engine* handle, int op, int table, uint64_t base,
                          uint64_t window_base, int first, double divisor) {
  Call call;
  call.table = table, call.base = base, call.window_base = window_base;
  call.first = first != 0, call.divisor = divisor;
  return submit<HostReduceScatter>(handle, op, call, "reduce_scatter");
}

int mm_done(mm_engine* handle, int op, int64_t ticket) {
  const Inside inside(handle);
  auto* found = inside.find<HostOperator>(op);
  if (!found) return refuse(handle, "done: no such operator");
  const int state = handle->engine->look([&] { return ticket_state(found, ticket); });
  if (state < 0) return refuse(handle, "done: no such ticket");
  return state == 0 && handle->engine->failed() ? -1 : state;
}

int mm_wait(mm_engine* handle, int op, int64_t ticket, double seconds) {
  const Inside inside(handle);
  auto* found = inside.find<HostOperator>(op);
  if (!found || handle->engine->look([&] { return ticket_state(found, ticket); }) < 0) {
    return refuse(handle, "wait: no such operator or ticket");
  }
  return handle->engine->wait([&] { return ticket_state(found, ticket) == 1; }, seconds);
}

int mm_publish_parameters(mm_engine* handle, int op, int parameters, const int* node,
                          const uint64_t* offset, const uint64_t* bytes,
                          const char* const* names) {
  const Inside inside(handle);
  auto* found = inside.find<HostPublish>(op);
  if (!found) return refuse(handle, "publish: no such operator");
  std::vector<megamuon::PublishParameter> list;
  std::vector<std::string> texts;
  u64 tiles = 0;
  for (int p = 0; p < parameters; ++p) {
    if (node[p] < 0 || node[p] >= found->place().nodes) {
      return refuse(handle, std::string("publish of '") + names[p] + "': owner node " +
                                std::to_string(node[p]) + " is outside 0.." +
                                std::to_string(found->place().nodes - 1));
    }
    list.push_back({node[p], offset[p], bytes[p], tiles});
    texts.emplace_back(names[p]);
    tiles += (bytes[p] + found->config().tile_bytes - 1) / found->config().tile_bytes;
  }
  if (tiles > found->config().tiles || parameters > found->config().parameters) {
    return refuse(handle, "publish: " + std::to_string(tiles) + " tiles of " +
                              std::to_string(parameters) + " parameters do not fit the operator");
  }
  return handle->engine->look([&] {
    if (found->busy()) return refuse(handle, "publish: a round is open");
    found->set_parameters(std::move(list), std::move(texts));
    return 0;
  });
}

int mm_publish_begin(mm_engine* handle, int op, int parameters, const int* order,
                     uint64_t version) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found || handle->engine->failed()) return -1;
  for (int i = 0; i < parameters; ++i) {
    if (!parameter_ok(handle, found, order[i])) return -1;
  }
  return handle->engine->change([&] {
    if (!found->round_done()) return refuse(handle, "publish: the round before is not over");
    for (int i = 0; i < parameters; ++i) {
      if (found->version(order[i]) < version) continue;
      return refuse(handle, "publish of '" + found->parameter_name(order[i]) + "': version " +
                                std::to_string(version) + " is not after " +
                                std::to_string(found->version(order[i])));
    }
    found->open(order, parameters, version);
    return 0;
  });
}

int mm_publish_task(mm_engine* handle, int op, int parameter) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found || handle->engine->failed() || !parameter_ok(handle, found, parameter)) return -1;
  return handle->engine->change([&] {
    if (!found->owns(parameter)) {
      return refuse(handle, "publish of '" + found->parameter_name(parameter) +
                                "': this rank does not own it");
    }
    if (found->hand_over(parameter)) return 0;
    return refuse(handle, "publish of '" + found->parameter_name(parameter) +
                              "': not in the round, or handed over before");
  });
}

uint64_t mm_publish_arrived(mm_engine* handle, int op, int parameter) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found || !parameter_ok(handle, found, parameter)) return 0;
  return found->arrived(parameter);
}

int mm_publish_compare(mm_engine* handle, int op, int parameters, const int* which,
                       const uint64_t* version) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found) return -1;
  for (int i = 0; i < parameters; ++i) {
    if (!parameter_ok(handle, found, which[i])) return -1;
    if (found->arrived(which[i]) != version[i]) return i;
  }
  return -2;
}

int mm_publish_wait(mm_engine* handle, int op, int parameters, const int* which,
                    const uint64_t* version, double seconds) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found) return -1;
  for (int i = 0; i < parameters; ++i) {
    if (!parameter_ok(handle, found, which[i])) return -1;
  }
  const auto over = [&] {
    for (int i = 0; i < parameters; ++i) {
      if (found->arrived(which[i]) < version[i]) return false;
    }
    return true;
  };
  return handle->engine->wait(over, seconds);
}

int mm_publish_drain(mm_engine* handle, int op, double seconds) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found) return -1;
  return handle->engine->wait([&] { return found->round_done(); }, seconds);
}

int mm_publish_round_done(mm_engine* handle, int op) {
  const Inside inside(handle);
  HostPublish* found = publish_of(inside, handle, op);
  if (!found) return -1;
  return handle->engine->look([&] { return int(found->round_done()); });
}

int mm_operator_cursors(mm_engine* handle, int op, uint64_t* words, int count) {
  const Inside inside(handle);
  auto* found = inside.find<HostOperator>(op);
  if (!found) return refuse(handle, "cursors: no such operator");
  const std::vector<u64> all = handle->engine->look([&] { return found->cursors(); });
  for (int i = 0; i < count && i < int(all.size()); ++i) words[i] = all[i];
  return int(all.size());
}

}  // extern "C"
