// What an mm_engine* points to, and how a thread enters and leaves a call of it.
//
// Owns the count of the threads inside.  Invariants: an engine is destroyed when nobody is inside
// and nobody can enter any more; a handle is never given back and outlives its engine, so a call
// that comes too late, whatever it raced with, finds the handle closed, and no later engine has its
// address (which costs some 200 bytes per engine ever made).  Tested by
// tests/collectives/test_host_engine_closing.py.
#pragma once
#include "engine.h"

// Made and destroyed by host_api.cpp.
struct mm_engine {
  std::unique_ptr<megamuon::Engine> engine;  // of whoever is Inside; then of mm_engine_destroy
  std::mutex mutex;                          // over all below
  std::condition_variable left;
  int inside = 0;  // threads in a call
  bool closed = false;
  std::string misuse;  // what the caller did wrong last
  std::string ended;   // why the engine had failed before it was closed, "" if it had not
};

namespace megamuon {

// A thread in a call of an engine, which lives until the thread has left; false where the engine is
// closed.
class Inside {
 public:
  explicit Inside(mm_engine* handle) : handle_(handle) {
    std::lock_guard<std::mutex> hold(handle->mutex);
    entered_ = !handle->closed;
    if (entered_) ++handle->inside;
  }
  ~Inside() {
    if (!entered_) return;
    std::lock_guard<std::mutex> hold(handle_->mutex);
    if (--handle_->inside == 0) handle_->left.notify_all();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  explicit operator bool() const { return entered_; }

  // The operator of this number, if it is of the kind; nullptr where it is not, or where the engine
  // is closed.
  template <class Kind>
  Kind* find(int op) const {
    return entered_ ? handle_->engine->template find<Kind>(op) : nullptr;
  }

 private:
  mm_engine* handle_;
  bool entered_;
};

// Note what the caller did wrong.
inline int refuse(mm_engine* handle, const std::string& text) {
  std::lock_guard<std::mutex> hold(handle->mutex);
  handle->misuse = text;
  return -1;
}

// Make the threads inside leave, refuse later ones, destroy the engine.
inline void destroy(mm_engine* handle) {
  std::string before;
  {
    const Inside inside(handle);
    if (!inside) return;
    before = handle->engine->failure();
  }
  {
    std::lock_guard<std::mutex> hold(handle->mutex);
    if (handle->closed) return;
    handle->closed = true;
    handle->ended = before;
  }
  handle->engine->stop();
  {
    std::unique_lock<std::mutex> hold(handle->mutex);
    handle->left.wait(hold, [&] { return handle->inside == 0; });
  }
  handle->engine.reset();
}

// What failed first, or was refused last; of a closed engine, that it is closed.
inline std::string error_of(mm_engine* handle) {
  const Inside inside(handle);
  const std::string failure = inside ? handle->engine->failure() : "";
  std::lock_guard<std::mutex> hold(handle->mutex);
  if (inside) return failure.empty() ? handle->misuse : failure;
  return "the engine is closed" + (handle->ended.empty() ? "" : ", after this: " + handle->ended);
}

}  // namespace megamuon
