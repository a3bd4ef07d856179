// SPDX-License-Identifier: Apache-2.0
//! \file launcher.h
//! Which of the machine's ranks this process is, by what its launcher says.
#pragma once

#include <functional>
#include <string>

#include "table/group.h"

namespace engram {

//! A variable of the environment, null where it is not set.
using Variables = std::function<const char*(const char*)>;

//! Name, rank and size; the others as GroupOptions has them. Without a launcher a group of one. The
//! first of these that has both a rank and a size counts, the innermost of nested launchers:
//!   torchrun               LOCAL_RANK, LOCAL_WORLD_SIZE
//!   Open MPI               OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE
//!   MPICH, Intel MPI       MPI_LOCALRANKID, MPI_LOCALNRANKS
//!   Slurm                  SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE (with SLURM_NODEID) or
//!                          SLURM_NTASKS_PER_NODE
//! The name is made of the job's id where there is one: TORCHELASTIC_RUN_ID and MASTER_PORT,
//! PMIX_NAMESPACE, SLURM_JOB_ID and SLURM_STEP_ID; so two jobs on one machine do not meet. MPICH
//! and Intel MPI say none: what tells their jobs apart is the one process of the launcher Hydra,
//! hydra_pmi_proxy, that a job's ranks on a machine have for an ancestor; ranks that do not see it
//! (each in a PID namespace of its own) need a name by hand (docs/scaling.md).
//! Throws Error for values that are no rank of a group, and where there is one of a pair but no
//! launcher with both. A Slurm batch script has a rank's variables but is none: a group of one.
GroupOptions launcher_group(const Variables& variables);

//! By this process's environment.
GroupOptions launcher_group();

}  // namespace engram
