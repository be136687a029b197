// The device library's C interface; see device_api.h.
//
// Owns the passage from C to the classes, and texts of failures.  Compiled by `make
// device-compile`.
#include "../device/device_operators.cuh"
#include "device_api.h"
#include "entry.h"

#include <mutex>

using namespace megamuon;

struct mmd_fabric {
  mmd_fabric(const void* id, const DeviceFabric::Options& options) : fabric(id, options) {}
  // Kernels use what the operators own until the fabric has ended them: see mmd_destroy.
  ~mmd_fabric() { fabric.close(); }

  // Run `body` unless the GPU has failed; what it throws becomes -1, and the first failure's text.
  template <class Body>
  int attempt(Body body) {
    const std::lock_guard<std::mutex> hold(mutex);
    if (!failure().empty()) return -1;
    try {
      return body();
    } catch (const std::exception& thrown) {
      text = thrown.what();
      return -1;
    }
  }

  // A refused table is no failure: the caller sends that group another way.
  template <class Body>
  int table(Body body) {
    return attempt([&] {
      try {
        return body();
      } catch (const std::exception& thrown) {
        refused = thrown.what();
        return -1;
      }
    });
  }

  DeviceOperator& find(int op, int kind) {
    if (op < 0 || op >= int(operators.size()) || operators[op]->kind() != kind) {
      throw std::runtime_error("there is no such operator of this kind: " + std::to_string(op));
    }
    return *operators[op];
  }

  const std::string& failure() {
    if (text.empty()) {
      if (const Failure* found = fabric.alarm().failure()) {
        const DeviceOperator& op = *operators[found->operation];
        text = "rank " + std::to_string(fabric.options().rank) + ": " +
               describe(*found, op.name(), op.table_name(found->table));
      } else if (fabric.alarm().abort_requested()) {
        text = "the device operators were aborted";
      }
    }
    return text;
  }

  DeviceFabric fabric;
  std::vector<std::unique_ptr<DeviceOperator>> operators;
  std::string text, refused;
  std::mutex mutex;
};

namespace {

cudaStream_t stream_of(uint64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// With lazy loading, a kernel's first launch may have to wait for those that spin.
template <class Site>
void load_kernels() {
  cudaFuncAttributes attributes;
  for (const int kind : {MM_ALL_GATHER, MM_REDUCE_SCATTER, MM_PUBLISH}) {
    check_cuda(cudaFuncGetAttributes(&attributes, DeviceOperator::kernel<Site>(kind)),
               "cudaFuncGetAttributes");
  }
  for (const void* kernel : {reinterpret_cast<const void*>(&publish_task_kernel),
                             reinterpret_cast<const void*>(&publish_wait_kernel)}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  }
}

}  // namespace

int mmd_code_version(void) { return MM_CODE_VERSION; }
int mmd_compiled_nccl(void) { return NCCL_VERSION_CODE; }
int mmd_loaded_nccl(char* error, int error_size) {
  return guarded(error, error_size, [] { return loaded_nccl(); });
}

int mmd_unique_id(void* id, char* error, int error_size) {
  return guarded(error, error_size, [&] {
    require_same_nccl();
    ncclUniqueId unique;
    check_nccl(ncclGetUniqueId(&unique), "ncclGetUniqueId");
    std::memcpy(id, &unique, sizeof unique);
    return 0;
  });
}

mmd_fabric* mmd_create(const void* id, int rank, int nodes, int columns, int device, int operators,
                       int blocks, int multimem, double deadline_seconds, char* error,
                       int error_size) {
  mmd_fabric* made = nullptr;
  guarded(error, error_size, [&] {
    if (operators < 1 || blocks < 1 || blocks > kMaxBlocks) {
      throw std::runtime_error("operators must be at least 1, blocks 1 .. " +
                               std::to_string(kMaxBlocks));
    }
    made = new mmd_fabric(id, {rank, nodes, columns, device, operators, blocks, multimem != 0,
                               deadline_seconds});
    return 0;
  });
  return made;
}

int mmd_query(mmd_fabric* handle, mmd_capability* out) {
  const Capability& found = handle->fabric.capability();
  *out = {found.lsa_ranks, found.direct, found.row, found.multimem, found.gin};
  return 0;
}

int mmd_open(mmd_fabric* handle, uint64_t control_bytes, uint64_t pool_bytes,
             mmd_fabric* pool_of) {
  return handle->attempt([&] {
#if MM_NCCL_HAS_GIN
    if (handle->fabric.uses_gin()) load_kernels<GinSite>();
#endif
    if (!handle->fabric.uses_gin()) load_kernels<LsaSite>();
    handle->fabric.open(control_bytes, pool_bytes,
                        pool_of == nullptr ? nullptr : &pool_of->fabric);
    return 0;
  });
}

uint64_t mmd_pool(mmd_fabric* handle) {
  return reinterpret_cast<uint64_t>(handle->fabric.pool());
}

int mmd_agree(mmd_fabric* handle, int* values, int count) {
  return handle->attempt([&] {
    handle->fabric.agree(values, count);
    return 0;
  });
}

void mmd_destroy(mmd_fabric* handle) {
  if (handle == nullptr || handle->fabric.close()) {
    delete handle;
    return;
  }
  // Freeing memory would wait for the kernels, without a limit.
  std::fprintf(stderr,
               "megamuon: rank %d: kernels of the device operators do not end, though they were "
               "told to and their communicator was aborted; their memory stays allocated\n",
               handle->fabric.options().rank);
}

uint64_t mmd_operator_control_bytes(int nodes, int columns, const mm_operator_config* config) {
  OperatorConfig given = config_of(*config);
  given.nodes = nodes, given.columns = columns;
  return device_control_bytes(given, given.groups);
}

int mmd_operator_create(mmd_fabric* handle, const mm_operator_config* config, const char* name) {
  return handle->attempt([&] {
    const int number = int(handle->operators.size());
    handle->operators.push_back(
        std::make_unique<DeviceOperator>(handle->fabric, number, config_of(*config), name));
    return number;
  });
}

int mmd_all_gather_table(mmd_fabric* handle, int op, int segments, const int* node,
                         const int* column, const uint64_t* offset, const uint64_t* bytes,
                         const char* name) {
  return handle->table([&] {
    std::vector<Segment> list;
    for (int j = 0; j < segments; ++j) list.push_back({node[j], column[j], offset[j], bytes[j], 0});
    DeviceOperator& found = handle->find(op, MM_ALL_GATHER);
    return found.add_table(list, Dtype::f32, Dtype::f32, Dtype::f32, name);
  });
}

int mmd_reduce_scatter_table(mmd_fabric* handle, int op, int segments, const int* node,
                             const int* column, const uint64_t* offset, const uint64_t* elements,
                             const uint64_t* window, int slot_dtype, int wire_dtype,
                             int window_dtype, const char* name) {
  return handle->table([&] {
    if (!is_dtype(slot_dtype) || !is_dtype(wire_dtype) || !is_dtype(window_dtype) ||
        !sum_supported(Dtype(slot_dtype), Dtype(wire_dtype), Dtype(window_dtype))) {
      throw std::runtime_error(std::string(name) + ": sums of these dtypes are not supported");
    }
    std::vector<Segment> list;
    for (int j = 0; j < segments; ++j) {
      list.push_back({node[j], column[j], offset[j], elements[j], window[j]});
    }
    return handle->find(op, MM_REDUCE_SCATTER)
        .add_table(list, Dtype(slot_dtype), Dtype(wire_dtype), Dtype(window_dtype), name);
  });
}

int mmd_upload(mmd_fabric* handle) {
  return handle->attempt([&] {
    for (const auto& op : handle->operators) op->upload();
    return 0;
  });
}

int mmd_all_gather(mmd_fabric* handle, int op, int table, uint64_t base, uint64_t stream) {
  return handle->attempt([&] {
    handle->find(op, MM_ALL_GATHER).call(table, base, 0, true, 1.0, stream_of(stream));
    return 0;
  });
}

int mmd_reduce_scatter(mmd_fabric* handle, int op, int table, uint64_t base, uint64_t window_base,
                       int first, double divisor, uint64_t stream) {
  return handle->attempt([&] {
    handle->find(op, MM_REDUCE_SCATTER)
        .call(table, base, window_base, first != 0, divisor, stream_of(stream));
    return 0;
  });
}

int mmd_publish_parameters(mmd_fabric* handle, int op, int parameters, const int* node,
                           const uint64_t* offset, const uint64_t* bytes,
                           const char* const* names) {
  return handle->attempt([&] {
    DeviceOperator& found = handle->find(op, MM_PUBLISH);
    const OperatorConfig& config = found.config();
    std::vector<PublishParameter> list;
    std::vector<std::string> texts;
    u64 tiles = 0;
    for (int p = 0; p < parameters; ++p) {
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
    found.set_parameters(std::move(list), std::move(texts));
    return 0;
  });
}

int mmd_publish_begin(mmd_fabric* handle, int op, int parameters, const int* order,
                      uint64_t version, uint64_t stream) {
  return handle->attempt([&] {
    handle->find(op, MM_PUBLISH).begin_round(order, parameters, version, stream_of(stream));
    return 0;
  });
}

int mmd_publish_task(mmd_fabric* handle, int op, int parameter, uint64_t stream) {
  return handle->attempt([&] {
    handle->find(op, MM_PUBLISH).hand_over(parameter, stream_of(stream));
    return 0;
  });
}

int mmd_publish_wait(mmd_fabric* handle, int op, int parameters, const int* which,
                     const uint64_t* version, uint64_t stream) {
  return handle->attempt([&] {
    handle->find(op, MM_PUBLISH).wait(parameters, which, version, stream_of(stream));
    return 0;
  });
}

void mmd_abort(mmd_fabric* handle) { handle->fabric.alarm().request_abort(); }

int mmd_error(mmd_fabric* handle, char* text, int text_size) {
  const std::lock_guard<std::mutex> hold(handle->mutex);
  const std::string& found = handle->failure();
  if (!found.empty()) return copy_text(found, text, text_size);
  const int length = copy_text(handle->refused, text, text_size);
  handle->refused.clear();
  return length;
}
