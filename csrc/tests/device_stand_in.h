// What a fabric of the stand-in for the device library is made of: ranks that meet, shared memory.
//
// Owns the names in /dev/shm and their removal.  Invariants: a collective step ends on every rank,
// with one error text where it fails on one; the names of a meeting and of control memory are gone
// when their step is over, that of a pool when its fabric is destroyed; what a killed rank leaves
// is removed by any other that destroys the same fabric.  See device_stand_in.cpp.
#pragma once
#include "bindings/device_api.h"
#include "engine/engine.h"
#include "pool/segment.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace megamuon {
namespace stand_in {

// Memory of this process; gives it back, with its name if it is this process's to remove.
class Mapping {
 public:
  Mapping() = default;
  Mapping(char* data, u64 bytes, std::string name)
      : data_(data), bytes_(bytes), name_(std::move(name)) {}
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping() {
    unlink();
    if (data_ != nullptr) segment_unmap(data_, bytes_);
  }
  char* data() const { return data_; }
  void unlink() {
    if (!name_.empty()) segment_unlink(name_.c_str());
    name_.clear();
  }

  static Mapping create(const std::string& name, u64 bytes) {
    std::string error;
    void* made = segment_create(name.c_str(), bytes, error);
    if (made == nullptr) throw std::runtime_error(error);
    return {static_cast<char*>(made), bytes, name};
  }
  static Mapping map(const std::string& name, u64 bytes) {
    std::string error;
    void* made = segment_map(name.c_str(), bytes, error);
    if (made == nullptr) throw std::runtime_error(error);
    return {static_cast<char*>(made), bytes, ""};
  }

 private:
  void swap(Mapping& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    name_.swap(other.name_);
  }
  char* data_ = nullptr;
  u64 bytes_ = 0;
  std::string name_;
};

// Whether a process has ended, reaped or not.
inline bool process_over(int64_t pid) {
  if (pid == int64_t(getpid())) return false;
#ifdef SYS_pidfd_open
  const int descriptor = int(syscall(SYS_pidfd_open, pid_t(pid), 0));
  if (descriptor >= 0) {
    pollfd one{descriptor, POLLIN, 0};
    const bool over = ::poll(&one, 1, 0) > 0;
    ::close(descriptor);
    return over;
  }
#endif
  return kill(pid_t(pid), 0) != 0 && errno == ESRCH;
}

// Where the ranks of a communicator exchange notes; all make the exchanges in one order.
class Meeting {
 public:
  static constexpr int kValues = 64;
  static constexpr double kLimitSeconds = 60;

  struct Note {
    int values[kValues];
    int64_t pid;
    char name[96];
    char problem[600];  // of the rank that wrote it; "" where there is none
  };

  // `name`: "/...", of this communicator alone.  Rank 0 makes what the others look for.
  Meeting(const std::string& name, int rank, int ranks) : rank_(rank), ranks_(ranks) {
    const u64 bytes = sizeof(Shared) + 2 * u64(ranks) * sizeof(Note);
    memory_ = rank == 0 ? Mapping::create(name, bytes) : find(name, bytes);
    Note own{};
    own.pid = int64_t(getpid());
    std::vector<int64_t> pids;
    for (const Note& note : exchange(own)) pids.push_back(note.pid);
    pids_ = pids;
    memory_.unlink();
  }

  const std::vector<int64_t>& pids() const { return pids_; }

  // The notes of all ranks.  Throws on all where one of them has a problem.
  //
  // Two sets of places take turns: who writes one again has seen all ranks at the exchange between,
  // so they have read it.
  std::vector<Note> exchange(const Note& own) {
    const u64 first = (count_++ % 2) * u64(ranks_);
    std::memcpy(static_cast<void*>(notes() + first + rank_), &own, sizeof own);
    shared()->arrived.fetch_add(1, std::memory_order_acq_rel);
    wait(count_ * u64(ranks_));
    const std::vector<Note> all(notes() + first, notes() + first + ranks_);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (all[rank].problem[0] == '\0') continue;
      throw std::runtime_error("rank " + std::to_string(rank) + ": " + all[rank].problem);
    }
    return all;
  }

  // As above; what `body` throws is this rank's problem.
  template <class Body>
  std::vector<Note> attempt(Body body) {
    Note own{};
    try {
      body(own);
    } catch (const std::exception& thrown) {
      std::snprintf(own.problem, sizeof own.problem, "%s", thrown.what());
    }
    return exchange(own);
  }

  // This rank takes part in no exchange any more, and nobody shall wait for it.
  void leave() {
    u64 nobody = 0;
    shared()->gone.compare_exchange_strong(nobody, u64(rank_) + 1, std::memory_order_acq_rel);
  }

 private:
  struct Shared {
    std::atomic<u64> arrived;  // over all exchanges
    std::atomic<u64> gone;     // rank + 1 of the first that left
  };

  Shared* shared() const { return reinterpret_cast<Shared*>(memory_.data()); }
  Note* notes() const { return reinterpret_cast<Note*>(memory_.data() + sizeof(Shared)); }

  static void nap() {
    const timespec time{0, 200 * 1000};
    nanosleep(&time, nullptr);
  }

  static Mapping find(const std::string& name, u64 bytes) {
    const u64 limit = now_ns() + u64(kLimitSeconds * 1e9);
    for (;;) {
      try {
        return Mapping::map(name, bytes);
      } catch (const std::exception& thrown) {
        if (now_ns() < limit) {
          nap();
          continue;
        }
        throw std::runtime_error("rank 0 did not come within " +
                                 std::to_string(int(kLimitSeconds)) + " s: " + thrown.what());
      }
    }
  }

  void wait(u64 target) {
    const u64 limit = now_ns() + u64(kLimitSeconds * 1e9);
    for (int turn = 1;; ++turn) {
      // In this order: a rank that has left may have taken part in this exchange before.
      const u64 gone = shared()->gone.load(std::memory_order_acquire);
      const u64 arrived = shared()->arrived.load(std::memory_order_acquire);
      if (arrived >= target) return;
      if (gone != 0) {
        throw std::runtime_error("rank " + std::to_string(gone - 1) + " has left while rank " +
                                 std::to_string(rank_) + " waits for it");
      }
      for (std::size_t rank = 0; turn % 256 == 0 && rank < pids_.size(); ++rank) {
        if (!process_over(pids_[rank])) continue;
        throw std::runtime_error("rank " + std::to_string(rank) + " died");
      }
      if (now_ns() > limit) {
        throw std::runtime_error("of " + std::to_string(ranks_) + " ranks, " +
                                 std::to_string(target - arrived) + " did not come within " +
                                 std::to_string(int(kLimitSeconds)) + " s");
      }
      if (turn < 64) {
        sched_yield();
      } else {
        nap();
      }
    }
  }

  const int rank_, ranks_;
  Mapping memory_;
  std::vector<int64_t> pids_;
  u64 count_ = 0;
};

struct Options {
  int rank, nodes, columns, operators, blocks;
  bool multimem;
  double deadline_seconds;
};

// A rank's side: meeting, memory, engine.
class Fabric {
 public:
  Fabric(const unsigned char* id, const Options& options)
      : options_(options),
        name_(name_of(id)),
        meeting_(name_, options.rank, options.nodes * options.columns) {
    const char* wanted = std::getenv("MEGAMUON_STAND_IN_MULTIMEM");
    int multimem = options.multimem && options.columns > 1 && wanted != nullptr &&
                   std::string(wanted) == "1";
    agree(&multimem, 1);
    capability_ = {ranks(), 1, 1, multimem, 0};
  }
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  ~Fabric() {
    if (borrowers_ > 0) {
      // On a GPU the others would go on in memory that is free.
      std::fprintf(stderr, "mmd_destroy: destroy those that use this fabric's pool first\n");
      std::abort();
    }
    engine_.reset();
    meeting_.leave();
    for (int rank = 0; rank < int(pool_names_.size()); ++rank) {
      if (process_over(meeting_.pids()[rank])) segment_unlink(pool_names_[rank].c_str());
    }
    if (lender_ != nullptr) --lender_->borrowers_;
  }

  const Options& options() const { return options_; }
  const mmd_capability& capability() const { return capability_; }
  int ranks() const { return options_.nodes * options_.columns; }
  bool opened() const { return engine_ != nullptr; }
  Engine& engine() { return *engine_; }
  u64 control_bytes() const { return control_bytes_; }
  u64 pool_bytes() const { return pool_bytes_; }
  char* pool() const { return pool_; }
  // By rank, which is the place too.
  std::vector<char*> pools() const {
    std::vector<char*> bases;
    for (const Mapping& one : pools_) bases.push_back(one.data());
    bases[options_.rank] = pool_;
    return bases;
  }
  // Where the operators' control memory begins; before it lie the engine's words.
  static constexpr u64 kOperators = sizeof(ControlHeader);
  char* operator_control(int rank) const { return controls_[rank].data() + kOperators; }

  void agree(int* values, int count) {
    if (count <= 0 || count > Meeting::kValues) throw std::runtime_error("agree: 1 .. 64 values");
    Meeting::Note own{};
    std::copy(values, values + count, own.values);
    for (const Meeting::Note& note : meeting_.exchange(own)) {
      for (int i = 0; i < count; ++i) values[i] = std::min(values[i], note.values[i]);
    }
  }

  void open(u64 control_bytes, u64 pool_bytes, Fabric* pool_of) {
    if (opened()) throw std::runtime_error("open: the windows are open already, and never grow");
    control_bytes_ = control_bytes, pool_bytes_ = pool_bytes;
    try {
      share(pool_of);
    } catch (...) {
      controls_.clear(), pools_.clear(), pool_names_.clear();
      pool_ = nullptr;
      throw;
    }
    controls_[options_.rank].unlink();
    lender_ = pool_of;
    if (lender_ != nullptr) ++lender_->borrowers_;
    std::vector<char*> bases;
    for (const Mapping& one : controls_) bases.push_back(one.data());
    engine_ = std::make_unique<Engine>(options_.rank, bases, meeting_.pids(),
                                       options_.deadline_seconds);
  }

  // May come before mmd_open is over, from another thread.
  void leave() { meeting_.leave(); }

 private:
  static std::string name_of(const unsigned char* id) {
    std::string name = "/megamuon-stand-in-";
    for (int i = 0; i < 16; ++i) {
      char text[3];
      std::snprintf(text, sizeof text, "%02x", id[i]);
      name += text;
    }
    return name;
  }
  std::string name(const char* what, int rank) const {
    return name_ + "-" + what + std::to_string(rank);
  }
  static u64 whole_pages(u64 bytes) { return std::max<u64>((bytes + 4095) / 4096, 1) * 4096; }

  void check_lends(u64 bytes) const {
    if (!opened()) throw std::runtime_error("open: the fabric that has the pool is not open");
    if (bytes == pool_bytes_) return;
    throw std::runtime_error("open: a pool of " + std::to_string(bytes) +
                             " bytes is asked for, and the one that is there has " +
                             std::to_string(pool_bytes_));
  }

  void share(Fabric* pool_of) {
    const int own = options_.rank;
    const u64 control = whole_pages(kOperators + control_bytes_);
    const u64 pool = whole_pages(pool_bytes_);
    controls_.resize(ranks()), pools_.resize(ranks());
    const auto made = meeting_.attempt([&](Meeting::Note& note) {
      if (pool_of != nullptr) pool_of->check_lends(pool_bytes_);
      controls_[own] = Mapping::create(name("control", own), control);
      std::string pool_name = name("pool", own);
      if (pool_of == nullptr) {
        pools_[own] = Mapping::create(pool_name, pool);
        pool_ = pools_[own].data();
      } else {
        pool_name = pool_of->own_pool_name();
        pool_ = pool_of->pool_;
      }
      std::snprintf(note.name, sizeof note.name, "%s", pool_name.c_str());
    });
    for (const Meeting::Note& note : made) pool_names_.emplace_back(note.name);
    // After it every rank's control words are zero, and everybody has them.
    meeting_.attempt([&](Meeting::Note&) {
      for (int rank = 0; rank < ranks(); ++rank) {
        if (rank == own) continue;
        controls_[rank] = Mapping::map(name("control", rank), control);
        pools_[rank] = Mapping::map(pool_names_[rank], pool);
      }
    });
  }

  const std::string& own_pool_name() const { return pool_names_[options_.rank]; }

  const Options options_;
  const std::string name_;
  Meeting meeting_;
  mmd_capability capability_{};
  u64 control_bytes_ = 0, pool_bytes_ = 0;
  std::vector<Mapping> controls_, pools_;  // by rank
  std::vector<std::string> pool_names_;
  char* pool_ = nullptr;
  Fabric* lender_ = nullptr;
  std::atomic<int> borrowers_{0};
  std::unique_ptr<Engine> engine_;  // last: it uses the memory
};

}  // namespace stand_in
}  // namespace megamuon
