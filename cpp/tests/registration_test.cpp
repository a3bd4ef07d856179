// SPDX-License-Identifier: Apache-2.0
// Registered and driver memory on a real GPU, each test in a process of its own: CUDA does not
// survive a fork. Without a GPU: what is refused.
#include "table/registration.h"

#include "doctest/doctest.h"
#include "engram/error.h"
#include "ranks.h"
#include "table/cumem.h"
#include "texts.h"

#if ENGRAM_CUDA
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "cuda_support.h"
#endif

namespace engram {
namespace {

#if ENGRAM_CUDA
constexpr int64_t kBytes = 2 * Registration::kPieceBytes + (3 << 20) + 77;

uint8_t byte_at(int64_t i) { return static_cast<uint8_t>(i * 31 + (i >> 20) + 7); }

//! Bytes at the borders of pieces and at the ends.
std::vector<int64_t> samples() {
  std::vector<int64_t> offsets;
  for (const int64_t middle :
       {int64_t{64}, Registration::kPieceBytes, 2 * Registration::kPieceBytes, kBytes - 64}) {
    for (int64_t i = middle - 64; i < middle + 64; ++i) offsets.push_back(i);
  }
  return offsets;
}

void fill(uint8_t* data) {
  for (const int64_t i : samples()) data[i] = byte_at(i);
}

//! What the GPU sees at the samples. A byte each: no copy spans two registrations.
std::string read_by_gpu(const uint8_t* data) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, 1), "memory");
  std::string problem;
  for (const int64_t i : samples()) {
    uint8_t found = 0;
    check_cuda(cudaMemcpy(memory, data + i, 1, cudaMemcpyDefault), "read a table");
    check_cuda(cudaMemcpy(&found, memory, 1, cudaMemcpyDefault), "read back");
    if (found != byte_at(i) && problem.empty()) problem = concat("other byte at ", i);
  }
  cudaFree(memory);
  return problem;
}

std::string expect(bool condition, const char* what) { return condition ? "" : what; }

//! Runs body(device 0) in a new process; skips without a GPU. It returns what went wrong.
void on_gpu(const std::function<std::string()>& body) {
  Process process([&] {
    try {
      require_cuda(0);
    } catch (const Error& error) {
      return concat("skipped: ", error.what());
    }
    const std::string problem = body();
    if (!problem.empty()) return problem;
    return std::string(cudaPeekAtLastError() == cudaSuccess ? "well" : "a CUDA error is left");
  });
  const std::string text = process.result(120);
  if (text.rfind("skipped", 0) == 0) {
    MESSAGE(text);
  } else {
    CHECK(text == "well");
  }
}

TEST_CASE("a GPU reads registered memory of every kind in place") {
  for (const MemoryKind kind : {MemoryKind::kMemfd, MemoryKind::kShm, MemoryKind::kPrivate}) {
    on_gpu([&]() -> std::string {
      // Neither the driver nor this counts it.
      const rlimit none{0, 0};
      setrlimit(RLIMIT_MEMLOCK, &none);
      setresuid(65534, 65534, 65534);  // root may lock whatever the limit
      HostMemory memory = HostMemory::create({.kind = kind}, kBytes, "table");
      memory.prefault(0, kBytes);
      fill(memory.data());
      const Registration pins(memory, 0, {});
      memory.protect();
      const PageShare share = page_shares({{memory.data(), kBytes}}).front();
      std::printf("%s: %.3f s for %lld bytes, %lld on huge pages\n", memory_kind_name(kind),
                  pins.seconds(), static_cast<long long>(kBytes),
                  static_cast<long long>(share.huge_bytes));
      return read_by_gpu(pins.on_device(0));
    });
  }
}

TEST_CASE("what the driver refuses leaves no piece and no CUDA error") {
  on_gpu([]() -> std::string {
    HostMemory memory = HostMemory::create({}, kBytes, "table");
    memory.prefault(0, kBytes);
    fill(memory.data());
    uint8_t* const last = memory.data() + 2 * Registration::kPieceBytes;
    check_cuda(cudaHostRegister(last, 1 << 20, cudaHostRegisterDefault), "the test's own");
    const std::string text = message_of([&] { const Registration pins(memory, 0, {}); });
    if (text.find("table: registration of bytes 2147483648 to ") == std::string::npos) return text;
    if (cudaPeekAtLastError() != cudaSuccess) return "a CUDA error is left";
    check_cuda(cudaHostUnregister(last), "the test's own");
    const Registration pins(memory, 0, {});
    return read_by_gpu(pins.on_device(0));
  });
}

TEST_CASE("a read-only mapping is registered where the driver can, and refused where not") {
  on_gpu([]() -> std::string {
    HostMemory memory = HostMemory::create({}, 4 << 20, "table");
    memory.prefault(0, 4 << 20);
    memory.protect();
    const bool can = can_register_read_only(0);
    std::printf("read-only registration: %s\n", can ? "yes" : "no");
    const std::string text = message_of([&] { const Registration pins(memory, 0, {}); });
    if (can) return expect(text == "no error", text.c_str());
    return expect(text.find("a mapping for writing") != std::string::npos, text.c_str());
  });
}

TEST_CASE("a fork leaves registered memory to the parent") {
  for (const MemoryKind kind : {MemoryKind::kMemfd, MemoryKind::kPrivate}) {
    on_gpu([&]() -> std::string {
      auto memory =
          std::make_unique<HostMemory>(HostMemory::create({.kind = kind}, kBytes, "table"));
      memory->prefault(0, kBytes);
      fill(memory->data());
      auto pins = std::make_unique<Registration>(*memory, 0, std::function<bool()>());
      const double begin = now_s();
      Process child([&] {
        pins.reset();
        memory.reset();
        return std::string("ended");
      });
      const double seconds = now_s() - begin;
      if (child.result() != "ended") return "the child did not end";
      if (seconds > 1) return concat("a fork took ", seconds, " s");
      return read_by_gpu(pins->on_device(0));
    });
  }
}

//! Sends descriptors through a socket, or receives as many as there are.
void send_files(int socket, const std::vector<FileDescriptor>& files) {
  std::vector<int> handles;
  for (const FileDescriptor& file : files) handles.push_back(file.get());
  std::vector<char> control(CMSG_SPACE(handles.size() * sizeof(int)));
  char byte = 0;
  iovec data{&byte, 1};
  msghdr message{.msg_iov = &data,
                 .msg_iovlen = 1,
                 .msg_control = control.data(),
                 .msg_controllen = control.size()};
  cmsghdr* const header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(handles.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), handles.data(), handles.size() * sizeof(int));
  if (sendmsg(socket, &message, 0) != 1) throw Error(ENGRAM_INTERNAL_ERROR, "nothing was sent");
}

std::vector<FileDescriptor> receive_files(int socket) {
  std::vector<char> control(CMSG_SPACE(64 * sizeof(int)));
  char byte = 0;
  iovec data{&byte, 1};
  msghdr message{.msg_iov = &data,
                 .msg_iovlen = 1,
                 .msg_control = control.data(),
                 .msg_controllen = control.size()};
  std::vector<FileDescriptor> files;
  if (recvmsg(socket, &message, 0) != 1) return files;
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header == nullptr) return files;
  for (size_t i = 0; i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
    int handle = -1;
    std::memcpy(&handle, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
    files.emplace_back(handle);
  }
  return files;
}

TEST_CASE("memory \"cumem\": another process and its GPU read it, after the first has ended") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const Signal sent;
  const Signal gone;
  for (const NumaPolicy& numa : {NumaPolicy{}, NumaPolicy{NumaPolicy::kInterleave, -1}}) {
    const HostMemoryOptions options{.kind = MemoryKind::kCumem, .numa = numa, .device = 0};
    Process first([&]() -> std::string {
      const std::string problem = cumem_problem(0, numa);
      if (!problem.empty()) return "skipped: " + problem;
      const double begin = now_s();
      HostMemory memory = HostMemory::create(options, kBytes, "table");
      std::printf("cumem, %zu parts: %.3f s for %lld bytes\n", memory.descriptors().size(),
                  now_s() - begin, static_cast<long long>(kBytes));
      memory.prefault(0, kBytes);
      fill(memory.data());
      const Registration pins(memory, 0, {});
      send_files(ends[0], memory.descriptors());
      sent.set();
      return read_by_gpu(pins.on_device(0));
    });
    Process second([&]() -> std::string {
      if (!sent.wait(60)) return "skipped: nothing came";
      std::vector<FileDescriptor> files = receive_files(ends[1]);
      if (!gone.wait(60)) return "the first did not end";
      HostMemory memory = HostMemory::attach(options, std::move(files), kBytes, "copy");
      const Registration pins(memory, 0, {});
      for (const int64_t i : samples()) {
        if (memory.data()[i] != byte_at(i)) return concat("other byte at ", i);
      }
      return read_by_gpu(pins.on_device(0));
    });
    const std::string text = first.result(120);
    if (text.rfind("skipped", 0) == 0) {
      MESSAGE(text);
      return;
    }
    CHECK(text.empty());
    gone.set();
    CHECK(second.result(120).empty());
  }
}

#else

TEST_CASE("without CUDA nothing is registered, and memory \"cumem\" says why") {
  HostMemory memory = HostMemory::create({}, 4096, "table");
  CHECK(!can_register_read_only(0));
  CHECK(message_of([&] { const Registration pins(memory, 0, {}); }).find("CPU-only build") !=
        std::string::npos);
  CHECK(cumem_problem(0, {}).find("CPU-only build") != std::string::npos);
  const HostMemoryOptions options{.kind = MemoryKind::kCumem, .device = 0};
  CHECK(message_of([&] { HostMemory::create(options, 4096, "table"); }).find("CPU-only build") !=
        std::string::npos);
  CHECK(gpu_node(0) == -1);
}

#endif

}  // namespace
}  // namespace engram
