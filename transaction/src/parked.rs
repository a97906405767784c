//! What is known of a parked container.

use std::collections::BTreeMap;

use firn_gpu::protocol::GpuMemory;
use firn_gpu::{CudaProcess, GpuPair, GpuUuid, SourceGpu};

use crate::lease::Lease;

/// A container whose GPUs are free: its GPU state is in the memory of its processes.
#[derive(Clone, Debug)]
pub struct Parked {
    /// Those that use CUDA.
    pub(crate) processes: Vec<CudaProcess>,
    /// Bytes of GPU memory that they had, by GPU of `home`.
    pub(crate) memory: GpuMemory,
    /// The container's GPUs at the pause.
    pub(crate) home: Vec<SourceGpu>,
    /// Its GPUs now, in the order of `home`.
    pub(crate) gpus: Vec<SourceGpu>,
    /// Where processes have their state from that a failed move had restored: GPUs in the order of `home`.
    pub(crate) elsewhere: BTreeMap<i32, Vec<GpuUuid>>,
    /// Some of the processes may have their state on GPUs: a resume has failed, and they could not be parked
    /// again.
    pub(crate) partly: bool,
    /// Containers that had the same GPUs, too.
    pub(crate) sharers: Vec<Lease>,
    /// Random id of the pause, for the job's hooks.
    pub(crate) id: String,
}

/// A call of the driver that restores GPU state.
pub(crate) struct RestoreCall {
    pub pids: Vec<i32>,
    /// Empty if every GPU stays.
    pub pairs: Vec<GpuPair>,
    /// Bytes that all processes of the container need together on each GPU.
    pub needs: GpuMemory,
}

impl Parked {
    /// The calls that restore these processes onto the container's GPUs of now.
    pub(crate) fn calls(&self, pids: &[i32]) -> Vec<RestoreCall> {
        let home: Vec<GpuUuid> = uuids(&self.home);
        let mut by_place: BTreeMap<&[GpuUuid], Vec<i32>> = BTreeMap::new();
        for pid in pids {
            let place = self.elsewhere.get(pid).unwrap_or(&home);
            by_place.entry(place).or_default().push(*pid);
        }
        let call = |(place, pids): (&[GpuUuid], Vec<i32>)| RestoreCall {
            pids,
            pairs: self.pairs_from(place),
            needs: self.needs(),
        };
        by_place.into_iter().map(call).collect()
    }

    /// All pairs, unless every GPU stays: the driver wants a pair for each GPU that a process could see.
    pub(crate) fn pairs_from(&self, place: &[GpuUuid]) -> Vec<GpuPair> {
        let pairs = place.iter().zip(&self.gpus).map(|(old, new)| GpuPair {
            old: old.clone(),
            new: new.uuid.clone(),
        });
        let pairs: Vec<GpuPair> = pairs.collect();
        if pairs.iter().all(|pair| pair.old == pair.new) {
            Vec::new()
        } else {
            pairs
        }
    }

    fn needs(&self) -> GpuMemory {
        let of = |(old, new): (&SourceGpu, &SourceGpu)| {
            let bytes = self.memory.get(&old.uuid)?;
            Some((new.uuid.clone(), *bytes))
        };
        firn_host::ordered::map_of(self.home.iter().zip(&self.gpus).filter_map(of))
    }

    /// These processes have their state from the container's GPUs of now.
    pub(crate) fn note_moved(&mut self, pids: &[i32]) {
        let here = uuids(&self.gpus);
        self.elsewhere.extend(pids.iter().map(|pid| (*pid, here.clone())));
    }

    /// Whether the GPU state of all processes is in memory, from the GPUs that the container has now.
    pub(crate) fn is_whole(&self) -> bool {
        let pids: Vec<i32> = self.processes.iter().map(|process| process.pid).collect();
        !self.partly && self.calls(&pids).iter().all(|call| call.pairs.is_empty())
    }

    /// Bytes of GPU memory that are in host memory.
    pub fn bytes(&self) -> u64 {
        self.memory.values().copied().fold(0, u64::saturating_add)
    }

    /// The container's GPUs.
    pub fn gpus(&self) -> &[SourceGpu] {
        &self.gpus
    }
}

fn uuids(gpus: &[SourceGpu]) -> Vec<GpuUuid> {
    gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}

#[cfg(test)]
mod tests {
    use firn_image::fixtures::{inventory, uuid};

    use super::*;

    /// Two processes that had 5 bytes on GPU 0 and 7 on GPU 1 together.
    fn parked() -> Parked {
        let gpus: Vec<SourceGpu> = inventory(195, 2).gpus.iter().map(SourceGpu::from).collect();
        let process = |pid| CudaProcess {
            pid,
            restore_tid: pid,
        };
        Parked {
            processes: vec![process(10), process(20)],
            memory: GpuMemory::from([(uuid(0), 5), (uuid(1), 7)]),
            home: gpus.clone(),
            gpus,
            elsewhere: BTreeMap::new(),
            partly: false,
            sharers: Vec::new(),
            id: String::new(),
        }
    }

    fn given(parked: &mut Parked, minors: [usize; 2]) {
        let all = inventory(195, 4).gpus;
        parked.gpus = minors.map(|minor| SourceGpu::from(&all[minor])).to_vec();
    }

    fn pairs(call: &RestoreCall) -> Vec<(GpuUuid, GpuUuid)> {
        let pairs = call.pairs.iter();
        pairs.map(|pair| (pair.old.clone(), pair.new.clone())).collect()
    }

    #[test]
    fn processes_that_stay_need_no_pairs() {
        let parked = parked();
        let calls = parked.calls(&[10, 20]);
        assert_eq!((calls.len(), &calls[0].pids), (1, &vec![10, 20]));
        assert_eq!((pairs(&calls[0]), &calls[0].needs), (vec![], &parked.memory));
        assert!(parked.is_whole());
        assert_eq!(parked.bytes(), 12);
    }

    #[test]
    fn processes_that_move_need_all_pairs_and_memory_there() {
        let mut parked = parked();
        given(&mut parked, [3, 1]);
        let calls = parked.calls(&[10, 20]);
        assert_eq!(pairs(&calls[0]), [(uuid(0), uuid(3)), (uuid(1), uuid(1))]);
        assert_eq!(calls[0].needs, GpuMemory::from([(uuid(3), 5), (uuid(1), 7)]));
        assert!(!parked.is_whole());
    }

    #[test]
    fn a_process_that_a_failed_move_has_restored_comes_from_there() {
        let mut parked = parked();
        given(&mut parked, [2, 3]);
        parked.note_moved(&[20]);
        given(&mut parked, [0, 1]);
        let calls = parked.calls(&[10, 20]);
        let of = |pid| calls.iter().find(|call| call.pids == [pid]).map(pairs).unwrap();
        assert_eq!(of(10), []);
        assert_eq!(of(20), [(uuid(2), uuid(0)), (uuid(3), uuid(1))]);
        assert!(!parked.is_whole());
        given(&mut parked, [1, 0]);
        let calls = parked.calls(&[20]);
        assert_eq!(pairs(&calls[0]), [(uuid(2), uuid(1)), (uuid(3), uuid(0))]);
    }
}
