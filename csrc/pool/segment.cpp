// Segments of POSIX shared memory; see segment.h.
#include "pool/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

namespace megamuon {
namespace {

// Where Linux keeps the segments: what a user has to enlarge.
constexpr const char* kFolder = "/dev/shm";

// Closes a descriptor; a mapping does not need it.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

std::string quoted(const char* name) { return "shared segment '" + std::string(name) + "'"; }

bool valid(const char* name, std::uint64_t bytes, std::string& error) {
  if (name == nullptr || name[0] != '/' || name[1] == '\0' || std::strchr(name + 1, '/') != nullptr) {
    error = quoted(name == nullptr ? "" : name) + ": the name must be '/' and one word without '/'";
    return false;
  }
  if (bytes == 0 || bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    error = quoted(name) + ": " + std::to_string(bytes) + " bytes is no size of a segment";
    return false;
  }
  return true;
}

// What keeps the pages from being had, with the numbers that tell a user by how much.
std::string no_pages(const char* name, std::uint64_t bytes, int number) {
  std::string text = quoted(name) + ": " + kFolder + " cannot give " + std::to_string(bytes) +
                     " bytes: " + std::strerror(number);
  struct statvfs room;
  if (::statvfs(kFolder, &room) == 0) {
    const auto unit = static_cast<std::uint64_t>(room.f_frsize);
    text += "; " + std::to_string(room.f_bavail * unit) + " of its " +
            std::to_string(room.f_blocks * unit) + " bytes are free";
  }
  return text + ". Enlarge it (mount -o remount,size=... " + kFolder +
         "; in a container: --shm-size or --ipc=host)";
}

// An interrupted allocation starts again: signals (a timer, a profiler) must not make it fail.
int allocate(int descriptor, std::uint64_t bytes) {
  int number;
  do {
    number = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  } while (number == EINTR);
  return number;
}

void* map(int descriptor, const char* name, std::uint64_t bytes, std::string& error) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (address == MAP_FAILED) {
    error = quoted(name) + ": mapping " + std::to_string(bytes) +
            " bytes failed: " + std::strerror(errno);
    return nullptr;
  }
  return address;
}

}  // namespace

void* segment_create(const char* name, std::uint64_t bytes, std::string& error) {
  if (!valid(name, bytes, error)) return nullptr;
  Descriptor descriptor(::shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (descriptor.number() < 0) {
    error = quoted(name) + ": creating it in " + kFolder + " failed: " + std::strerror(errno);
    return nullptr;
  }
  void* address = nullptr;
  if (const int number = allocate(descriptor.number(), bytes)) {
    error = no_pages(name, bytes, number);
  } else {
    address = map(descriptor.number(), name, bytes, error);
  }
  if (address == nullptr) ::shm_unlink(name);
  return address;
}

void* segment_map(const char* name, std::uint64_t bytes, std::string& error) {
  if (!valid(name, bytes, error)) return nullptr;
  Descriptor descriptor(::shm_open(name, O_RDWR | O_CLOEXEC, 0));
  if (descriptor.number() < 0) {
    error = quoted(name) + ": opening it in " + kFolder + " failed: " + std::strerror(errno);
    return nullptr;
  }
  struct stat facts;
  if (::fstat(descriptor.number(), &facts) != 0) {
    error = quoted(name) + ": " + std::strerror(errno);
    return nullptr;
  }
  // A mapping beyond the end would be had, and the first touch there would kill the process.
  if (static_cast<std::uint64_t>(facts.st_size) < bytes) {
    error = quoted(name) + ": has " + std::to_string(facts.st_size) + " bytes, and " +
            std::to_string(bytes) + " are asked for";
    return nullptr;
  }
  return map(descriptor.number(), name, bytes, error);
}

int segment_unlink(const char* name) { return ::shm_unlink(name) == 0 ? 0 : errno; }

int segment_unmap(void* address, std::uint64_t bytes) {
  return ::munmap(address, bytes) == 0 ? 0 : errno;
}

}  // namespace megamuon
