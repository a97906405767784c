//! The end of a job on its node, and what is known of its pod if the answer is lost.
//!
//! An API server may evict a pod and its answer be lost on the way: by a load balancer, a time limit, a
//! kubectl that was killed. So a failure of the call proves nothing by itself.

use std::thread;
use std::time::{Duration, Instant};

use firn_host::Chain;
use firn_transaction::transfer::StaysHere;

use super::copies::{Copies, OnTargets};
use super::error::DrainError;
use super::pods::{Job, List, Pod};
use super::{Drain, PAUSE};
use crate::output::note;

/// How long it is looked whether a pod ends.
const UNSURE: Duration = Duration::from_secs(30);

/// What is known of a job's pod.
enum Known {
    StaysHere(StaysHere),
    /// It is gone, or is about to be.
    Ends,
    Nothing,
}

impl Drain {
    /// Ends the pod, if its disruption budget permits it.
    pub(super) fn end(&self, job: &Job, there: OnTargets, copies: &Copies<'_>) -> Result<(), DrainError> {
        let Err(error) = self.evict(job, there) else {
            return Ok(());
        };
        match self.fate(job, error.is_refusal()) {
            Known::Ends => {
                note!("{}/{}: ends, after: {}", job.namespace, job.pod, Chain(&error));
                Ok(())
            }
            Known::StaysHere(proof) => {
                self.remove_useless(copies, proof);
                Err(error)
            }
            Known::Nothing => Err(self.kept(job, copies, &error, "may end or run on")),
        }
    }

    /// Why a job whose checkpoints are not on all nodes is not moved. Nobody has ended it for this run.
    pub(super) fn without_copies(&self, job: &Job, copies: &Copies<'_>, error: DrainError) -> DrainError {
        match self.fate(job, true) {
            Known::StaysHere(proof) => {
                self.remove_useless(copies, proof);
                error
            }
            Known::Ends => self.kept(job, copies, &error, "was ended by somebody else"),
            Known::Nothing => self.kept(job, copies, &error, "cannot be looked at"),
        }
    }

    /// With the condition by which a Job does not count it as failed. What it does after its checkpoint is
    /// done again: it gets no time to do more.
    fn evict(&self, job: &Job, _there: OnTargets) -> Result<(), DrainError> {
        let Job { namespace, pod, .. } = job;
        let eviction = serde_json::json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": { "name": pod, "namespace": namespace },
            "deleteOptions": { "gracePeriodSeconds": 1, "preconditions": { "uid": job.uid } },
        });
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/eviction");
        self.kubectl.post(&path, &eviction.to_string()).map(drop)
    }

    /// Looks at the pod until it is known. `is_final`: nothing that this run has asked for can end it any
    /// more.
    fn fate(&self, job: &Job, is_final: bool) -> Known {
        let begun = Instant::now();
        loop {
            match self.ends(job) {
                Ok(true) => return Known::Ends,
                Ok(false) if is_final => return Known::StaysHere(StaysHere::seen()),
                _ if begun.elapsed() >= UNSURE.min(self.timeout) => return Known::Nothing,
                _ => thread::sleep(PAUSE),
            }
        }
    }

    /// Whether the pod is gone, or is about to be.
    fn ends(&self, job: &Job) -> Result<bool, DrainError> {
        let of_name = format!("metadata.name={}", job.pod);
        let what = [
            "pods",
            "--namespace",
            &job.namespace,
            "--field-selector",
            &of_name,
        ];
        let pods: List<Pod> = self.kubectl.get(&what)?;
        let pod = pods.items.iter().find(|pod| pod.metadata.uid == job.uid);
        Ok(pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some() || pod.has_ended()))
    }

    fn kept(&self, job: &Job, copies: &Copies<'_>, error: &DrainError, state: &'static str) -> DrainError {
        let kept = copies.shown(&self.from);
        DrainError::Kept {
            pod: format!("{}/{}", job.namespace, job.pod),
            state,
            kept: if kept.is_empty() { "none".to_owned() } else { kept },
            cause: Chain(error).to_string(),
        }
    }
}
