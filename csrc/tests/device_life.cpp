// The life of the device library over a recorded CUDA and NCCL: which calls it makes, and when.
//
// Owns what of the host's side of the device library can be shown without a GPU: how windows are
// registered, that tables go to the GPU once and not in the middle of a pass, that a publish's
// kernel never waits for its own host, and how a fabric ends whose kernels do or do not.  Kernels
// are launched, that is written down, and do not run.  Built and run by
// tests/collectives/test_device_life.py, with -DRECORDED_NCCL=22809, 22907 or 23203:
//
//   g++ -std=c++17 -pthread -DRECORDED_NCCL=23203 -Icsrc/tests/recorded_gpu -Icsrc
//       csrc/tests/device_life.cpp -o device_life
#define MEGAMUON_DEVICE_ON_HOST
#include "../bindings/device_api.cu"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::printf("NOT SO: %s; the calls were:\n", what);
  for (const std::string& call : recorded::calls) std::printf("  %s\n", call.c_str());
}

long count(const std::string& text) {
  return std::count_if(recorded::calls.begin(), recorded::calls.end(), [&](const auto& call) {
    return call.find(text) != std::string::npos;
  });
}

bool before(const std::string& first, const std::string& second) {
  const auto& calls = recorded::calls;
  const auto a = std::find(calls.begin(), calls.end(), first);
  return a != calls.end() && std::find(calls.begin(), a, second) == a;
}

std::string error_of(mmd_fabric* handle) {
  char text[512] = "";
  mmd_error(handle, text, sizeof text);
  return text;
}

// Rank 0 of two nodes of two columns.
mmd_fabric* make(int operators, double deadline = 0.3) {
  char id[128] = {}, text[512] = "";
  mmd_fabric* made = mmd_create(id, 0, 2, 2, 0, operators, 4, 0, deadline, text, sizeof text);
  if (made == nullptr) std::printf("mmd_create: %s\n", text);
  return made;
}

mm_operator_config config_of(int kind) {
  mm_operator_config config{};
  config.kind = kind, config.nodes = 2, config.columns = 2, config.slots = 4;
  config.chunk_bytes = 4096, config.groups = 4;
  if (kind == MM_PUBLISH) config.parameters = 4, config.tiles = 16, config.tile_bytes = 4096;
  return config;
}

constexpr uint64_t kControl = 1 << 20, kPool = 1 << 16;
const uint64_t kStream = reinterpret_cast<uint64_t>(new RecordedStream);

mmd_fabric* open_with(int kind) {
  mmd_fabric* handle = make(1);
  const mm_operator_config config = config_of(kind);
  if (mmd_open(handle, kControl, kPool, nullptr) != 0 ||
      mmd_operator_create(handle, &config, "operator") != 0) {
    std::printf("%s\n", error_of(handle).c_str());
    ++failures;
  }
  return handle;
}

int add_table(mmd_fabric* handle) {
  const int node[] = {0, 1}, column[] = {1, 0};
  const uint64_t offset[] = {0, 8192}, bytes[] = {8192, 12288};
  return mmd_all_gather_table(handle, 0, 2, node, column, offset, bytes, "group");
}

// Every window whose words others raise is strictly ordered, where the version can say so.
void windows() {
  recorded::calls.clear();
  mmd_fabric* handle = make(1);
  mmd_open(handle, kControl, kPool, nullptr);
#ifdef NCCL_WIN_STRICT_ORDERING
  check(count("window of 1048576 bytes, flags 3") == 1, "the control window is strictly ordered");
#else
  check(count("window of 1048576 bytes, flags 1") == 1, "the control window is symmetric");
#endif
  check(count("window of 65536 bytes, flags 1") == 1, "the pool is not, it has no words");
  check(count("legacy stream") == 0, "nothing is put on the legacy stream");
  mmd_destroy(handle);
}

void tables() {
  mmd_fabric* handle = open_with(MM_ALL_GATHER);
  recorded::calls.clear();
  const int first = add_table(handle), second = add_table(handle);
  check(recorded::calls.empty(), "a table that is made touches no GPU");
  check(mmd_upload(handle) == 0, "tables are uploaded");
  check(count("cudaMalloc") == 1 && count("cudaMemcpy") == 1, "in one allocation and one copy");
  check(count("legacy stream") == 0, "and not on the legacy stream");
  recorded::calls.clear();
  check(mmd_upload(handle) == 0 && recorded::calls.empty(), "and once");
  check(mmd_all_gather(handle, 0, first, 0, kStream) == 0, "a call");
  check(mmd_all_gather(handle, 0, second, 0, kStream) == 0, "a call of another table");
  check(recorded::calls == std::vector<std::string>({"launch", "launch"}),
        "a call is a launch and nothing else");
  const int late = add_table(handle);
  check(mmd_all_gather(handle, 0, late, 0, kStream) == -1, "a call of a table that is not there");
  check(error_of(handle).find("operator, group: the table is not on the GPU yet") == 0,
        "says what it lacks");
  mmd_destroy(handle);
}

void publish() {
  const int node[] = {0, 1, 0}, order[] = {0, 1, 2}, unowned[] = {1};
  const uint64_t offset[] = {0, 4096, 8192}, bytes[] = {4096, 4096, 4096};
  const char* names[] = {"a", "b", "c"};
  for (const bool complete : {true, false}) {
    mmd_fabric* handle = open_with(MM_PUBLISH);
    recorded::calls.clear();
    check(mmd_publish_parameters(handle, 0, 3, node, offset, bytes, names) == 0, "parameters");
    check(count("cudaMalloc") == 1 && count("cudaMemcpy") == 1, "are one allocation and one copy");
    recorded::calls.clear();
    check(mmd_publish_begin(handle, 0, 1, unowned, 1, kStream) == 0, "a round without own ones");
    check(mmd_publish_task(handle, 0, 2, kStream) == 0, "a task before its round");
    if (complete) {
      check(mmd_publish_task(handle, 0, 0, kStream) == 0, "and another");
      check(mmd_publish_begin(handle, 0, 3, order, 2, kStream) == 0, "then the round");
      check(count("launch") == 4, "four launches");
      check(mmd_publish_task(handle, 0, 1, kStream) == -1, "a parameter of another rank");
      check(error_of(handle).find("'b': this rank does not own it") != std::string::npos, "text");
    } else {
      check(mmd_publish_begin(handle, 0, 3, order, 2, kStream) == -1,
            "a round whose kernel would wait for its host");
      check(error_of(handle) == "operator of 'a': hand it over before its round begins", "text");
      check(count("launch") == 2, "no kernel waits");
    }
    mmd_destroy(handle);
  }
}

// How a fabric ends.
void ends(bool kernels_end, bool abort_ends_kernels) {
  mmd_fabric* handle = open_with(MM_ALL_GATHER);
  const int table = add_table(handle);
  mmd_upload(handle);
  mmd_all_gather(handle, 0, table, 0, kStream);
  recorded::calls.clear();
  recorded::kernels_end = kernels_end, recorded::abort_ends_kernels = abort_ends_kernels;
  const int held = recorded::allocations;
  mmd_destroy(handle);
  check(count("cudaDeviceSynchronize") == 0, "no wait without a limit");
  if (kernels_end) {
    check(count("ncclCommDestroy") == 1 && count("ncclCommAbort") == 0, "an end in order");
    check(count("ncclCommWindowDeregister") == 2 && count("ncclMemFree") == 2, "gives all back");
    check(before("ncclDevCommDestroy", "ncclCommDestroy"), "in the order of NCCL");
  } else if (abort_ends_kernels) {
    check(count("ncclCommAbort") == 1 && count("ncclCommDestroy") == 0, "an abort");
    check(before("ncclCommAbort", "ncclMemFree") && before("ncclCommAbort", "cudaFree"),
          "before memory is freed");
    check(recorded::allocations < held && count("ncclMemFree") == 2, "which is freed");
  } else {
    check(count("ncclCommAbort") == 1, "an abort");
    check(count("ncclMemFree") == 0 && count("cudaFree") == 0,
          "nothing is freed that a kernel may use");
    check(recorded::allocations == held, "and nothing of the operators");
  }
  recorded::kernels_end = true;
}

}  // namespace

int main() {
  windows();
#if MM_NCCL_HAS_GIN
  recorded::lsa_ranks = 2;  // two nodes, reached over the network
  windows();
#endif
  tables();
  publish();
  ends(true, true);
  ends(false, true);
  ends(false, false);
  if (failures == 0) std::printf("all as it should be\n");
  return failures == 0 ? 0 : 1;
}
