/* SPDX-License-Identifier: Apache-2.0 */
/*! \file engram.h
 *  The C ABI of libtrtllm_engram.so: what Python binds through ctypes. Compiles as C11 and as C++.
 *
 *  Letters in shapes: T tokens, B requests, L Engram layers, N highest n-gram order, H hash heads
 *  per order, C = (N-1)*H columns, D values per row (head_dim), S = C*D/32 scales per token.
 *  BF16 is passed as uint16 bits; FP8 (E4M3) and E8M0 as uint8 bits. Arrays are contiguous unless
 *  a stride is named, belong to the caller and lie all on one place: host memory for the CPU,
 *  memory that the GPU can read else.
 *
 *  Every function catches all exceptions and returns an engram_status; engram_last_error() has
 *  the text.
 */
#ifndef ENGRAM_ENGRAM_H_
#define ENGRAM_ENGRAM_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ENGRAM_API __attribute__((visibility("default")))
#else
#define ENGRAM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/*! Raised by one for every incompatible change of this header; Python refuses a library of
 *  another number. */
#define ENGRAM_ABI_VERSION 1

typedef enum engram_status {
  ENGRAM_OK = 0,
  ENGRAM_INVALID_ARGUMENT = 1, /*!< what the caller passed is wrong; nothing was written */
  ENGRAM_CUDA_UNAVAILABLE = 2, /*!< CPU-only build, no or too old a driver, or no such device */
  ENGRAM_CUDA_ERROR = 3,       /*!< a CUDA call failed */
  ENGRAM_DEVICE_FAULT = 4,     /*!< an earlier kernel met bad input (see engram_device_fault), or
                                *   a lookup a bad disk (see engram_table_fault) */
  ENGRAM_OUT_OF_MEMORY = 5,
  ENGRAM_INTERNAL_ERROR = 6
} engram_status;

typedef enum engram_dtype {
  ENGRAM_FLOAT32 = 0,
  ENGRAM_FLOAT16 = 1,
  ENGRAM_BFLOAT16 = 2,
  ENGRAM_INT32 = 3,
  ENGRAM_INT64 = 4
} engram_dtype;

/*! What a lookup writes for each token. */
typedef enum engram_row_form {
  /*! out BF16 [T, C*D]: value * 2^(scale-127), rounded once to nearest even */
  ENGRAM_ROWS_BF16 = 0,
  /*! out uint8 [T, C*(D+D/32)]: each row's D value bytes, then its D/32 scale bytes */
  ENGRAM_ROWS_PACKED = 1,
  /*! out FP8 [T, C*D], out_scales E8M0 [T, S] */
  ENGRAM_ROWS_MXFP8_LINEAR = 2,
  /*! out FP8 [T, C*D], out_scales E8M0 in F8_128x4 order, zero past row T */
  ENGRAM_ROWS_MXFP8_128X4 = 3
} engram_row_form;

/*! Where an op runs. */
typedef struct engram_exec {
  int32_t device;      /*!< -1: this CPU; else a CUDA device ordinal */
  int32_t num_threads; /*!< CPU only: 0 = as many as the process may use */
  void* stream;        /*!< CUDA only: cudaStream_t; NULL is the legacy default stream */
} engram_exec;

/*! engram_hash: token ids to row ids. */
typedef struct engram_hash_args {
  const int64_t* multipliers; /*!< [L, N] odd, below 2^63 / compressed vocabulary */
  const int64_t* primes;      /*!< [L, C] */
  const int64_t* offsets;     /*!< [L, C] exclusive running sum of the layer's primes */
  const int32_t* token_map;   /*!< [vocab_size] raw id to compressed id */
  const int32_t* token_ids;   /*!< [T] raw ids */
  const void* positions;      /*!< [T] int32 or int64: position of each token in its request */
  const int32_t* cu_seqlens;  /*!< [B+1] first token of each request; NULL: a token each, B = T */
  /*! [B, N-1] raw ids before the request's first token, nearest first; -1 unknown, INT32_MIN lost
   *  (see engram_history_args); or NULL */
  const int32_t* lookback_ids;
  const uint8_t* lookback_dead; /*!< [B, N-1] 0 or 1; NULL: none dead */
  const uint8_t* dead_mask;     /*!< [T] 0 or 1; NULL: none dead */
  int32_t* hash_ids; /*!< out [T, L, C]; of a padding token -1, of one that needs a lost id
                      *   INT32_MIN */
  /*! out [B, N-1] the window for the request's next call, or NULL; not lookback_ids itself */
  int32_t* next_lookback_ids;
  int64_t num_tokens;
  int32_t num_requests;
  int32_t num_layers;
  int32_t max_ngram_size;
  int32_t num_heads;
  int32_t vocab_size;
  int32_t pad_token_id;    /*!< raw id; blocked and unknown positions count as its compressed id */
  int32_t positions_dtype; /*!< ENGRAM_INT32 or ENGRAM_INT64 */
} engram_hash_args;

/*! How a lookup runs on a GPU; all paths give the same bits. */
typedef enum engram_lookup_path {
  /*! the fastest for the number of tokens and the place of values, of those that workspace_bytes
   *  are enough for */
  ENGRAM_LOOKUP_AUTO = 0,
  ENGRAM_LOOKUP_DIRECT = 1,  /*!< each row by the threads that write it */
  ENGRAM_LOOKUP_SORTED = 2,  /*!< each row once, in the order of rows; takes workspace */
  ENGRAM_LOOKUP_GATHERED = 3 /*!< the same, brought by CPU threads; takes lanes */
} engram_lookup_path;

/*! engram_history: the tokens before a call, from slots of TensorRT-LLM's paged KV cache, for
 *  engram_hash; and this call's tokens into their slots. A slot is what one attention layer of one
 *  head, which nothing else writes, keeps as a token's key: raw id int32, then a check word.
 *  Requests are context chunks, then generation steps of the same number of tokens each (drafts);
 *  with beams each beam is a request, those of one prompt side by side. A check word that does not
 *  hold is an error on the CPU; on a GPU a fault, and the request's window is INT32_MIN. */
typedef struct engram_history_args {
  uint8_t* primary_pool;   /*!< blocks of tokens_per_block slots, 4-byte aligned */
  uint8_t* secondary_pool; /*!< the same, or NULL */
  /*! [B, 2, max_blocks] blocks of keys, then of values; bit 31: in the secondary pool */
  const int32_t* block_offsets;
  const int32_t* sequence_lengths;  /*!< [B] tokens, this call's included */
  const int32_t* context_lengths;   /*!< [B] a chunk's tokens; of a generation step the prompt's */
  const int32_t* cache_indirection; /*!< [B - num_contexts, max_sequence] beams; NULL: width 1 */
  const int32_t* token_ids;         /*!< [T] raw ids */
  int32_t* positions;               /*!< out [T] */
  int32_t* cu_seqlens;              /*!< out [B+1] */
  int32_t* lookback_ids;            /*!< out [B, N-1] */
  int64_t num_tokens;
  int32_t num_requests;
  int32_t num_contexts;       /*!< requests that are context chunks */
  int32_t num_context_tokens; /*!< tokens of those */
  int32_t max_blocks;
  int32_t tokens_per_block;
  int32_t slot_bytes; /*!< of a token's key: at least 8, a multiple of 4 */
  int32_t beam_width;
  int32_t max_sequence;
  int32_t max_ngram_size;
} engram_history_args;

/*! Rows that a GPU keeps as lookups read them out of a table in host memory, in the place of those
 *  that it has kept the longest. Lookups of all streams of that GPU read and write them at once
 *  (src/ops/adaptive_index.h). Buckets are chosen as those of engram_hot_rows are. */
typedef struct engram_adaptive_rows {
  uint64_t* slots; /*!< [num_buckets, 4], all bits set before the first lookup; 32-byte aligned */
  uint8_t* values; /*!< FP8 [num_buckets * 4, D]; 8-byte aligned */
  uint8_t* scales; /*!< E8M0 [num_buckets * 4, D/32]; NULL: those of the table are read */
  int64_t num_buckets; /*!< below 2^31; 0: none */
} engram_adaptive_rows;

/*! Rows of a table in host memory that a GPU's memory holds too, as engram_table_view gives them: a
 *  static part, which nothing changes, and an adaptive one. Row id i is in bucket ((i *
 *  0x9E3779B97F4A7C15 mod 2^64) >> 32) * num_buckets >> 32, or not there; its place among all keys
 *  is its place in the arrays. All in memory of the GPU that looks up; a CPU looks at none of it.
 */
typedef struct engram_hot_rows {
  const int32_t* keys;   /*!< row ids [num_buckets, 8], -1: nothing there; 32-byte aligned */
  const uint8_t* values; /*!< FP8 [num_buckets * 8, D]; 8-byte aligned */
  const uint8_t* scales; /*!< E8M0 [num_buckets * 8, D/32]; NULL: those of the table are read */
  /*! [C, 3] rows looked for, found in the static and in the adaptive part, added to; 8-byte
   *  aligned; or NULL */
  uint64_t* counts;
  int64_t num_buckets; /*!< of the static part, below 2^31; 0: none */
  engram_adaptive_rows adaptive;
} engram_hot_rows;

/*! engram_lookup: row ids to rows. Ids outside [first_row, first_row + num_rows) read as zeros, but
 *  INT32_MIN as NaN: value bytes 0x7F, scale bytes 0xFF. */
typedef struct engram_lookup_args {
  const uint8_t* values; /*!< FP8 [num_rows, D]; on a GPU 8-byte aligned, 16 for MXFP8 forms */
  const uint8_t* scales; /*!< E8M0 [num_rows, D/32] */
  const int32_t* ids;    /*!< [T, C], tokens ids_stride elements apart */
  void* out;             /*!< see engram_row_form; on a GPU 16-byte aligned but for packed rows */
  uint8_t* out_scales;   /*!< MXFP8 forms only */
  int64_t ids_stride;    /*!< elements between tokens: C, or L*C for one layer of hash_ids */
  int64_t first_row;     /*!< row id of values[0] */
  int64_t num_rows;
  int64_t num_tokens;
  int32_t num_columns;
  int32_t head_dim; /*!< D, a multiple of 32 */
  int32_t form;     /*!< engram_row_form */
  /*! GPU memory of engram_lookup_workspace bytes that is this call's until its work is done, 8-byte
   *  aligned, or NULL; a CPU takes none */
  void* workspace;
  int64_t workspace_bytes;
  int32_t path;            /*!< engram_lookup_path; the CPU has one */
  int32_t values_in_host;  /*!< 1: the GPU reads values in host memory, over PCIe */
  int32_t num_read_blocks; /*!< that read the table, sorted; 0: as many as are fastest */
  engram_hot_rows hot;     /*!< of row ids from first_row on, the same bytes as the table's */
  void* lanes;             /*!< of the table, by engram_table_view: CPU threads may bring its rows;
                            *   NULL: they may not */
} engram_lookup_args;

/*! engram_stage: packed rows to the operands of a block-scaled GEMM. */
typedef struct engram_stage_args {
  const uint8_t* packed; /*!< [T, C*(D+D/32)] */
  uint8_t* values;       /*!< out FP8 [T, C*D] */
  /*! out E8M0 in F8_128x4 order, ceil(T/128)*ceil(S/4)*512 bytes, zero past row T */
  uint8_t* scales;
  int64_t num_tokens;
  int32_t num_columns;
  int32_t head_dim;
} engram_stage_args;

/*! How a projection runs on a GPU; all kernels give the same bits. One that cannot run there is an
 * error (ENGRAM_CUDA_ERROR). */
typedef enum engram_project_kernel {
  ENGRAM_PROJECT_AUTO = 0,    /*!< the fastest for the number of tokens, sizes and device */
  ENGRAM_PROJECT_GENERIC = 1, /*!< every architecture and size */
  ENGRAM_PROJECT_SM90_16 = 2, /*!< compute capability 9.0; named by the tokens of a tile */
  ENGRAM_PROJECT_SM90_64 = 3,
  ENGRAM_PROJECT_SM90_128 = 4,
  ENGRAM_PROJECT_SM90_256 = 5,
  ENGRAM_PROJECT_SM90_32 = 6,
  ENGRAM_PROJECT_SM90_WIDE_192 = 7, /*!< the same with 192 outputs a block */
  ENGRAM_PROJECT_SM90_WIDE_256 = 8
} engram_project_kernel;

/*! Order of a projection's weights. */
typedef enum engram_weight_layout {
  ENGRAM_WEIGHT_ROW_MAJOR = 0, /*!< FP8 [out_features, in_features] */
  /*! What the kernels of compute capability 9.0 read fastest, by which alone it is taken: as many
   *  bytes, made once by trtllm_engram.builder.weight_layout, which describes them. No NaN;
   *  out_features is a multiple of 16. */
  ENGRAM_WEIGHT_SM90_V1 = 1
} engram_weight_layout;

/*! engram_project: out = x W^T with MXFP8's meaning (FP8 times powers of two, FP32 sums, one
 *  rounding to BF16). */
typedef struct engram_project_args {
  const uint16_t* x;     /*!< BF16 [T, in_features]; on a GPU 16-byte aligned */
  const uint8_t* weight; /*!< out_features * in_features bytes; on a GPU 16-byte aligned */
  const uint8_t* scale;  /*!< E8M0 [ceil(out_features/32), ceil(in_features/32)] */
  uint16_t* out;         /*!< BF16 [T, out_features] */
  int64_t num_tokens;
  int32_t in_features; /*!< a multiple of 32 */
  int32_t out_features;
  int32_t kernel;        /*!< engram_project_kernel; the CPU has one */
  int32_t weight_layout; /*!< engram_weight_layout; the CPU takes row-major ones */
} engram_project_args;

/*! engram_gate: out = hidden + sigmoid(+-sqrt(max(|dot|, 1e-6))) * value, in FP32, rounded once. */
typedef struct engram_gate_args {
  const void* hidden;        /*!< [T, hc_mult, hidden_size] of dtype */
  const uint16_t* kv;        /*!< BF16 [T, (hc_mult+1)*hidden_size]: hc_mult keys, then the value */
  const uint16_t* q_weight;  /*!< BF16 [hc_mult, hidden_size] */
  const uint16_t* k_weight;  /*!< BF16 [hc_mult, hidden_size] */
  const uint8_t* token_mask; /*!< [T] 0 or 1, 0 leaves the token as it is; NULL: all 1 */
  void* out;                 /*!< like hidden; may be hidden itself */
  int64_t num_tokens;
  int32_t hc_mult;
  int32_t hidden_size;
  int32_t dtype; /*!< ENGRAM_BFLOAT16, ENGRAM_FLOAT16 or ENGRAM_FLOAT32, of hidden and out */
  float eps;     /*!< rms_norm_eps */
} engram_gate_args;

/*! Each op returns once the CPU is done, or once the GPU work is enqueued on exec->stream
 *  (capturable; allocates nothing). On the CPU, ids outside the vocabulary and boundaries that do
 *  not rise from 0 to T are refused; on the GPU they set the device's fault word and give row ids
 *  -1. T = 0 takes NULL arrays and does nothing, but that a hash hands on its lookback windows. */
ENGRAM_API engram_status engram_hash(const engram_hash_args* args, const engram_exec* exec);
ENGRAM_API engram_status engram_history(const engram_history_args* args, const engram_exec* exec);
ENGRAM_API engram_status engram_lookup(const engram_lookup_args* args, const engram_exec* exec);
/*! Bytes of workspace that a lookup with these sizes takes on a GPU; 0 where its path takes none.
 *  Reads no array. */
ENGRAM_API engram_status engram_lookup_workspace(const engram_lookup_args* args,
                                                 int64_t* num_bytes);
ENGRAM_API engram_status engram_stage(const engram_stage_args* args, const engram_exec* exec);
ENGRAM_API engram_status engram_project(const engram_project_args* args, const engram_exec* exec);
ENGRAM_API engram_status engram_gate(const engram_gate_args* args, const engram_exec* exec);

/*! Reads and clears the fault that a kernel or a host node left on a device: ENGRAM_OK, or
 * ENGRAM_DEVICE_FAULT with the text in engram_last_error(). Every op on that device does this
 * first, so a fault is reported once. Does not synchronise: a kernel still running may report
 * later. */
ENGRAM_API engram_status engram_device_fault(int32_t device);

/*! Text of this thread's last failure, valid until its next call into the library; never NULL. */
ENGRAM_API const char* engram_last_error(void);

/*! ENGRAM_ABI_VERSION of the library that is loaded. */
ENGRAM_API int32_t engram_abi_version(void);

/*! JSON object with static storage: version, abi, git, compiler, cuda ("" in a CPU-only build),
 *  architectures, tensorrt_headers, minimum_driver. */
ENGRAM_API const char* engram_build_info(void);

/*! Bench ceiling: reads num_blocks blocks of block_bytes at base + block_ids[i]*block_bytes with
 *  num_threads (0: all) threads and, past the caches, fills as many whole lines of 64 bytes of out
 *  as num_blocks times out_bytes_per_block take (0: none, out may be null); out is aligned to a
 *  line. *checksum keeps the reads from being optimised away. */
ENGRAM_API engram_status engram_bench_read_blocks(const uint8_t* base, const int64_t* block_ids,
                                                  int64_t num_blocks, int32_t block_bytes,
                                                  uint8_t* out, int32_t out_bytes_per_block,
                                                  int32_t num_threads, uint64_t* checksum);

/*! Bench ceiling of tables on disk: reads pages of 4096 bytes of a file, page_ids[num_pages], by
 *  the same queues and num_threads (0: as many) as a lookup reads rows. */
ENGRAM_API engram_status engram_bench_read_pages(const char* path, const int64_t* page_ids,
                                                 int64_t num_pages, int32_t num_threads);

/*! Tables: one registry a process binds names to tables; engines hold the names (docs of the keys:
 *  README, Tables). TRTLLM_ENGRAM_TABLES names a TOML file whose tables are bound when a name is
 *  first looked for. Thread-safe. */

/*! Binds every [tables.NAME] of a TOML text, or none. Relative paths are relative to `folder`;
 *  `where` names the text in errors, unless it is "". Host memory is filled before this returns.
 *  With more than one rank in [group] (or in the launcher's variables where there is none), all
 *  ranks of the node bind together: any rank's failure, death or silence is every rank's error and
 *  leaves nothing. */
ENGRAM_API engram_status engram_table_bind(const char* toml, const char* folder, const char* where);

/*! The same for a file, which only its owner (this user or root) may be able to write. */
ENGRAM_API engram_status engram_table_bind_file(const char* path);

/*! Reads such a file and the manifests of its stores; the error is the first fault of them. Nothing
 *  is bound, allocated or loaded, and no other rank is met. */
ENGRAM_API engram_status engram_table_check_file(const char* path);

/*! For a rank that cannot come so far as to bind: meets the group that the text's [group] (or the
 *  launcher) says, tells it `reason`, and fails as all its ranks do. What [tables] the text has is
 *  not looked at. */
ENGRAM_API engram_status engram_table_decline(const char* toml, const char* folder,
                                              const char* where, const char* reason);

/*! Bytes that the bind or serve call under way has loaded and has to load, over all ranks of its
 *  group; both 0 where none runs, or none has got so far. */
ENGRAM_API engram_status engram_table_progress(int64_t* done, int64_t* total);

/*! Makes the bind call under way (or the loading of a serve call) fail on all ranks; where none
 *  runs, nothing. Returns at once; may be called in a signal handler. */
ENGRAM_API engram_status engram_table_cancel(void);

/*! Frees a name; the memory goes with the last engine that uses the table. */
ENGRAM_API engram_status engram_table_unbind(const char* name);

/*! Fills values, scales, first_row, num_rows, num_columns, head_dim and values_in_host for lookups
 *  on a CUDA device, loading what is not there yet. Valid until the name is unbound. A table on
 * disk has NULL for values and scales: engram_table_lookup reads it. For a table bound with heads =
 * true these are of this rank's columns: ids are those of num_columns columns from first_column
 * (see engram_table_describe) on, with the stride of all. */
ENGRAM_API engram_status engram_table_view(const char* name, int32_t device,
                                           engram_lookup_args* args);

/*! The same for lookups on this CPU; a table that is in GPU memory is refused. */
ENGRAM_API engram_status engram_table_host_view(const char* name, engram_lookup_args* args);

/*! engram_lookup in a bound table, on this CPU in one in host memory or on disk, on a GPU in one on
 *  disk: values, scales, first_row and num_rows of args are not looked at. Rows on disk that cannot
 *  be read are NaN, which the table's next lookup or engram_table_fault reports; once the table's
 *  files have changed, every call does. On a GPU the rows are read by host nodes of the stream, and
 *  may then also be the device's fault; the call takes 16 MiB of pinned memory for each lookup that
 *  runs at once, which the table keeps, and where the stream captures what the lookup needs, which
 *  the graph keeps with the table. */
ENGRAM_API engram_status engram_table_lookup(const char* name, const engram_lookup_args* args,
                                             const engram_exec* exec);

/*! ENGRAM_OK, or ENGRAM_DEVICE_FAULT where an earlier lookup could not read rows of the table, with
 *  file and offset in engram_last_error(). */
ENGRAM_API engram_status engram_table_fault(const char* name);

/*! Writes a JSON object {name: {store, layer, fingerprint, content_id, num_rows,
 *  first_column, num_columns, head_dim, placement, scales, memory, pages, numa, num_bytes,
 *  huge_bytes, rank, size, keeper, since, load_seconds, registered_seconds, disk, hot}} with its
 *  zero into text[capacity]; *size is the bytes it needs, and nothing is written if they are more.
 *
 *  first_column is 0 but for heads = true, where num_rows and num_columns are this rank's;
 *  num_bytes is what this rank's arrays take in host and GPU memory; memory (the kind that the
 *  ranks agreed on), pages, numa and huge_bytes (of host memory, on pages of 2 MiB) are null where
 *  nothing is in host memory; keeper is the name of the process that holds the memory, or null;
 *  since is in seconds since 1970; registered_seconds is null where no GPU reads the memory;
 *  disk is null but for placement disk: {reads_by: io_uring or pread, hot_bytes and hot_capacity
 *  (rows) that may be kept in RAM, and counts since the table was bound: hot_rows found there,
 *  disk_rows, num_reads}; hot is null but for host tables with hot rows: {num_rows and
 *  capacity of the static part and adaptive_capacity (rows) on each GPU, num_bytes on all of them,
 *  and since they were copied there, rows by n-gram order ("2"): asked, found in the static part
 *  and adaptive_found}. */
ENGRAM_API engram_status engram_table_describe(char* text, size_t capacity, size_t* size);

/*! Loads the tables of a TOML text into host memory and hands them to processes of this user that
 *  bind with memory = "keeper", until engram_tables_stop(). `name` is what they call this keeper;
 *  `socket`, unless empty, is a path to listen at in place of an abstract socket. What was handed
 *  out lives on in who has it. */
ENGRAM_API engram_status engram_tables_serve(const char* toml, const char* folder,
                                             const char* where, const char* name,
                                             const char* socket);

/*! JSON array of what this user's processes that hold tables say of themselves, pid 0, or one of
 *  them does (empty: it does not): format_version, pid, role ("rank", "keeper"), name, rank, size,
 *  since, socket, id, tables. text, capacity and size as of engram_table_describe. */
ENGRAM_API engram_status engram_table_holders(int32_t pid, char* text, size_t capacity,
                                              size_t* size);

/*! This process's rank on its machine as the launcher's variables say; 0: there is no launcher. */
ENGRAM_API engram_status engram_launcher_rank(int32_t* rank);

/*! Ends the serve call of this process, if any. Returns at once; may be called in a signal
 *  handler. */
ENGRAM_API engram_status engram_tables_stop(void);

/*! Takes messages of the library from any of its threads: level 10 debug, 20 info, 30 warning, 40
 *  error. It must not call back into the library. */
typedef void (*engram_log_function)(int32_t level, const char* text);

/*! Sets where messages go; NULL: warnings and errors to stderr, as at the beginning. Once this
 *  returns, the function before is called no more. */
ENGRAM_API engram_status engram_set_log(engram_log_function log);

/*! Registers the plugins with the TensorRT that this process has loaded. Needed only where this
 *  library was loaded before TensorRT; repeating it does no harm. */
ENGRAM_API engram_status engram_register_plugins(void);

/*! JSON object with static storage, {plugin: {doc, fields: {name: {type, required, default,
 *  doc}}}}; empty in CPU-only builds. */
ENGRAM_API const char* engram_plugin_fields(void);

/*! 1 in the copy of this library that the process loaded first; other copies bind no tables and
 *  register no plugins. */
ENGRAM_API int32_t engram_copy_is_first(void);

#ifdef __cplusplus
}
#endif
#endif /* ENGRAM_ENGRAM_H_ */
