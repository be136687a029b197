// Drives the operators of one rank, and never hangs where it can say why.
//
// Owns the progress thread, waiting, the deadline, the abort word and the watch over peer
// processes. Invariants: one thread at a time steps the operators (whoever waits does it itself;
// the progress thread does while nobody waits); a thread with nothing to do sleeps on the rank's
// bell instead of spinning, since ranks may outnumber cores; a failure is reported once, to every
// waiter of every rank; stop() makes every thread leave its call, and whoever destroys the engine
// sees to it that none is left inside.  Tested by tests/distributed/test_ready.py and
// test_ready_failures.py, tests/collectives/test_host_engine_closing.py and csrc/tests/threads.cpp.
//
// [Note: who steps]
//
// A wait that follows its call at once should not pay for a hand-over to another thread, and a call
// that nobody waits for must move all the same while this rank computes.  So a waiter takes the
// driver's seat if it is free.  The progress thread sits there only while there are calls and no
// waiters.
//
// [Note: a rank that has closed]
//
// A rank with calls outstanding that closes gives up, which all ranks hear.  One without any sets
// `closed`, after its puts are done, and may do so while others are still in a call that is over
// for it: they need nothing more of it, however long they stand (the last acknowledgements of a
// call are for the next one).  It is missed only where it never came to the call that this rank is
// in.  Its entry word says which was its last (all ranks make the same calls in the same order, and
// count them); a publish has no such word, but there all that a rank waits for comes from the rank
// before it.  So no time has to pass: the words decide.
#pragma once
#include "host_operators.h"

#include <poll.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <mutex>
#include <thread>

namespace megamuon {

class Engine {
 public:
  Engine(int rank, std::vector<char*> control, std::vector<int64_t> pids, double deadline_seconds)
      : rank_(rank),
        control_(std::move(control)),
        pids_(std::move(pids)),
        deadline_ns_(u64(deadline_seconds * 1e9)) {
    for (char* base : control_) headers_.push_back(reinterpret_cast<ControlHeader*>(base));
    open_processes();
    progress_ = std::thread([this] { run(); });
  }

  // No thread may be inside a call; stop() makes them leave.
  ~Engine() {
    stop();
    progress_.join();
    {
      std::lock_guard<std::mutex> hold(mutex_);
      leave_outstanding();  // one that was made during stop()
      own().closed.store(1, std::memory_order_release);
    }
    for (ControlHeader* header : headers_) {
      if (header != &own()) ring(header);
    }
    for (int descriptor : descriptors_) {
      if (descriptor >= 0) close(descriptor);
    }
  }

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return int(control_.size()); }
  char* control(int rank) const { return control_[rank]; }
  ControlHeader* header(int rank) const { return headers_[rank]; }

  // Every wait ends, with -1 unless what it waits for is there, and so does every later one.  The
  // other ranks hear of it if calls are outstanding.
  void stop() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      leave_outstanding();
      stopping_ = true;
    }
    work_.notify_all();
    finished_.notify_all();
    ring(&own());
  }

  // `ranks`: of the operator's places, node * columns + column.  Without them a rank that closes
  // without coming to a call is missed after the deadline alone.
  int add(std::unique_ptr<HostOperator> op, std::vector<int> ranks = {}) {
    std::lock_guard<std::mutex> hold(mutex_);
    ranks_.push_back(std::move(ranks));
    op->fabric().set_link(link_);
    op->name_ranks(headers_);
    operators_.push_back(std::move(op));
    return int(operators_.size()) - 1;
  }

  // The operator of this number, if it is of the kind; else nullptr.
  template <class Kind>
  Kind* find(int op) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (op < 0 || op >= int(operators_.size())) return nullptr;
    return dynamic_cast<Kind*>(operators_[op].get());
  }

  // Do something to the operators while nobody steps them, then let them move.
  template <class Action>
  auto change(Action action) {
    std::unique_lock<std::mutex> hold = enter();
    const auto result = action();
    last_move_ = now_ns();
    // Entering at once spares the peers a wake-up of the progress thread.
    if (failure_.empty()) step_all();
    const bool outstanding = busy();
    hold.unlock();
    if (outstanding) wake();
    return result;
  }

  // Read something while nobody steps.
  template <class Action>
  auto look(Action action) {
    const std::unique_lock<std::mutex> hold = enter();
    return action();
  }

  // Step until `over` holds: 0; 1 where `seconds` are over; -1 where the engine failed or stops.
  int wait(const std::function<bool()>& over, double seconds) {
    const u64 limit = now_ns() + u64(seconds * 1e9);
    std::unique_lock<std::mutex> hold = enter();
    ++waiters_;
    if (driving_) ring(&own());  // the progress thread gives its seat to a waiter, asleep or not
    while (!over() && !ended() && now_ns() < limit) {
      if (driving_) {
        finished_.wait_for(hold, std::chrono::milliseconds(20));
        continue;
      }
      driving_ = true;
      drive(hold, [&] { return over() || ended() || now_ns() >= limit; });
      driving_ = false;
      finished_.notify_all();
    }
    --waiters_;
    const int result = over() ? 0 : ended() ? -1 : 1;
    const bool outstanding = busy() && !ended();
    hold.unlock();
    if (outstanding) wake();
    return result;
  }

  // A rank without calls does not watch the others, so what they say is looked up here.
  bool failed() { return !failure().empty(); }
  std::string failure() {
    std::lock_guard<std::mutex> hold(mutex_);
    notice_abort();
    return failure_;
  }
  void abort(const std::string& reason) {
    std::lock_guard<std::mutex> hold(mutex_);
    give_up(reason);
  }
  void set_link(const Link& link) {
    std::lock_guard<std::mutex> hold(mutex_);
    link_ = link;
    for (auto& op : operators_) op->fabric().set_link(link);
  }

 private:
  static constexpr int kSpins = 30;                   // yields before a thread goes to sleep
  static constexpr u64 kNap = 50ull * 1000 * 1000;    // and looks at its peers so often

  ControlHeader& own() { return *headers_[rank_]; }

  // A driver that has something to move gives the mutex up only when somebody asks.
  std::unique_lock<std::mutex> enter() {
    wanting_.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock<std::mutex> hold(mutex_);
    wanting_.fetch_sub(1, std::memory_order_relaxed);
    return hold;
  }

  bool ended() const { return stopping_ || !failure_.empty(); }

  bool busy() const {
    for (const auto& op : operators_) {
      if (op->busy()) return true;
    }
    return false;
  }

  bool holds_back() const {
    for (const auto& op : operators_) {
      if (op->fabric().holds_back()) return true;
    }
    return false;
  }

  // Until an injected link delivers next.
  u64 held_for() const {
    u64 left = ~u64(0);
    for (const auto& op : operators_) left = std::min(left, op->fabric().held_for());
    return left;
  }

  bool step_all() {
    bool moved = false;
    for (auto& op : operators_) {
      if (!op->busy() && !op->fabric().holds_back()) continue;
      moved |= op->step();
      op->fabric().flush();
    }
    if (moved) last_move_ = now_ns();
    return moved;
  }

  void wake() {
    if (asleep_.load(std::memory_order_acquire)) work_.notify_one();
    if (own().sleepers.load(std::memory_order_seq_cst)) ring(&own());
  }

  // In the driver's seat, the mutex held; it is free between steps.
  template <class Over>
  void drive(std::unique_lock<std::mutex>& hold, Over over) {
    int idle = 0;
    while (!over()) {
      const uint32_t seen = own().bell.load(std::memory_order_seq_cst);
      if (step_all()) {
        idle = 0;
        if (wanting_.load(std::memory_order_relaxed) > 0) {
          hold.unlock();
          sched_yield();
          hold.lock();
        }
        continue;
      }
      const u64 nap = std::min(kNap, held_for());
      if (++idle < kSpins || nap == 0) {
        hold.unlock();
        sched_yield();
        hold.lock();
        continue;
      }
      hold.unlock();
      sleep_until_rung(&own(), seen, nap);
      hold.lock();
      check_peers();
    }
  }

  void run() {
    std::unique_lock<std::mutex> hold(mutex_);
    while (!stopping_) {
      const bool needed = (busy() || holds_back()) && failure_.empty();
      if (!needed || driving_ || waiters_ > 0) {
        asleep_.store(true, std::memory_order_release);
        if (needed) {
          work_.wait_for(hold, std::chrono::milliseconds(20));
        } else {
          work_.wait(hold, [&] {
            return stopping_ || ((busy() || holds_back()) && failure_.empty());
          });
        }
        asleep_.store(false, std::memory_order_release);
        continue;
      }
      driving_ = true;
      drive(hold, [&] {
        return stopping_ || waiters_ > 0 || !failure_.empty() || !(busy() || holds_back());
      });
      driving_ = false;
      finished_.notify_all();
    }
  }

  // --- failures ----------------------------------------------------------------------------------

  void open_processes() {
    for (int64_t pid : pids_) {
      int descriptor = -1;
#ifdef SYS_pidfd_open
      if (pid != int64_t(getpid())) descriptor = int(syscall(SYS_pidfd_open, pid_t(pid), 0));
#endif
      descriptors_.push_back(descriptor);
    }
  }

  bool dead(int peer) const {
    if (pids_[peer] == int64_t(getpid())) return false;
    if (descriptors_[peer] >= 0) {
      pollfd one{descriptors_[peer], POLLIN, 0};
      return ::poll(&one, 1, 0) > 0;
    }
    return kill(pid_t(pids_[peer]), 0) != 0 && errno == ESRCH;
  }

  // Whether another rank has given up; then this one fails with its reason.
  bool notice_abort() {
    if (!failure_.empty()) return true;
    const u64 by = own().aborted.load(std::memory_order_acquire);
    if (by == 0) return false;
    const int peer = int(by) - 1;
    std::string reason = "no reason given";
    const ControlHeader& told = *headers_[peer];
    if (told.reason_ready.load(std::memory_order_acquire)) reason = told.reason;
    fail("rank " + std::to_string(peer) + " gave up: " + reason);
    return true;
  }

  void check_peers() {
    if (notice_abort()) return;
    if (!busy()) return;
    for (int peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      if (has_closed(peer)) {
        if (step_all()) return;  // its last words
        if (needs(peer)) return lose(peer, " has closed its collectives");
        continue;
      }
      // It may have closed, and gone for good, since it was looked at.
      if (dead(peer) && !has_closed(peer)) return lose(peer, " died");
    }
    if (deadline_ns_ != 0 && now_ns() - last_move_ > deadline_ns_) {
      const double stood = double(now_ns() - last_move_) * 1e-9;
      const std::string text = "nothing moved on rank " + std::to_string(rank_) + " for " +
                               std::to_string(u64(stood)) + " s at " + standing();
      fail(text);
      tell(text);
    }
  }

  bool has_closed(int peer) const {
    return headers_[peer]->closed.load(std::memory_order_acquire) != 0;
  }

  void lose(int peer, const char* how) {
    const std::string text = "rank " + std::to_string(peer) + how + " while rank " +
                             std::to_string(rank_) + " stood at " + standing();
    fail(text);
    tell(text);
  }

  // Whether a call that this rank is in, and that does not move, waits for a peer that has closed.
  // See [Note: a rank that has closed].
  bool needs(int peer) const {
    for (std::size_t i = 0; i < operators_.size(); ++i) {
      const HostOperator& op = *operators_[i];
      const auto at = std::find(ranks_[i].begin(), ranks_[i].end(), peer);
      if (!op.busy() || at == ranks_[i].end()) continue;
      const int index = int(at - ranks_[i].begin()), columns = op.place().columns;
      if (const auto* publish = dynamic_cast<const HostPublish*>(&op)) {
        if (index == op.place().previous() && awaits_others(*publish)) return true;
      } else if (entered(op, peer, index % columns) < entered(op, rank_, op.place().column)) {
        return true;
      }
    }
    return false;
  }

  // The last call that a place has entered, by its own word.
  u64 entered(const HostOperator& op, int rank, int column) const {
    const u64 word = op.config().control_offset + ControlLayout{}.entry(column);
    const auto* entry = reinterpret_cast<std::atomic<u64>*>(control_[rank] + word);
    return entry->load(std::memory_order_acquire);
  }

  static bool awaits_others(const HostPublish& publish) {
    for (int p = 0; p < publish.parameters(); ++p) {
      if (!publish.owns(p) && publish.arrived(p) < publish.version(p)) return true;
    }
    return false;
  }

  void leave_outstanding() {
    if (failure_.empty() && busy()) give_up("closed with calls outstanding: " + standing());
  }

  std::string standing() {
    std::string text;
    for (auto& op : operators_) {
      if (op->busy()) text += (text.empty() ? "" : "; ") + op->describe();
    }
    return text.empty() ? "nothing" : text;
  }

  void fail(const std::string& text) {
    if (failure_.empty()) failure_ = "lost contact: " + text;
    finished_.notify_all();
  }

  void give_up(const std::string& reason) {
    fail("rank " + std::to_string(rank_) + " gave up: " + reason);
    tell(reason);
  }

  // Make all ranks fail with `reason`, unless somebody told them before.
  void tell(const std::string& reason) {
    ControlHeader& mine = own();
    if (!mine.reason_ready.load(std::memory_order_acquire)) {
      std::strncpy(mine.reason, reason.c_str(), sizeof(mine.reason) - 1);
      mine.reason_ready.store(1, std::memory_order_release);
    }
    for (ControlHeader* header : headers_) {
      u64 nobody = 0;
      header->aborted.compare_exchange_strong(nobody, u64(rank_) + 1, std::memory_order_acq_rel);
      if (header != &mine) ring(header);
    }
  }

  const int rank_;
  std::vector<char*> control_;
  std::vector<ControlHeader*> headers_;
  std::vector<int64_t> pids_;
  std::vector<int> descriptors_;
  const u64 deadline_ns_;
  u64 last_move_ = now_ns();
  Link link_;

  std::mutex mutex_;                  // over all below, and over the operators
  std::condition_variable finished_;  // for waiters: the seat is free, or something is over
  std::condition_variable work_;      // for the progress thread
  std::vector<std::unique_ptr<HostOperator>> operators_;
  std::vector<std::vector<int>> ranks_;  // of the operators
  std::string failure_;
  bool driving_ = false, stopping_ = false;
  int waiters_ = 0;
  std::atomic<bool> asleep_{false};
  std::atomic<int> wanting_{0};  // threads that want the mutex while a driver steps
  std::thread progress_;  // last: it uses all of the above
};

}  // namespace megamuon
