//! Restore of a container from a checkpoint.
//!
//! ```text
//! Create: prepare -- refusals, GPU map, spec edits; nothing is started --> PreparedRestore
//! Start:  run     -- runc restore, tasks stay stopped
//!                 -- tasks compared with the spec
//!                 -- /dev repaired, driver restore with the map, unlock
//!                 -- continue --> Restored
//!         stdio is connected -- commit, unless it was killed meanwhile --> running
//!         any failure, and a kill before the commit --> rollback: nothing of the container is left,
//!                                                       the image is as it was
//! ```
//!
//! The image is untrusted: because of it a restore may be refused, but what the container may use comes from
//! the target's own spec and configuration. An image without GPU state is restored as the stock shim would do
//! it. A process whose GPU state is not completely restored is never continued.

mod compare;
mod container;
mod device_free;
mod error;
pub(crate) mod named;
mod phases;
mod place;
mod prepare;
mod rollback;
mod run;
#[cfg(test)]
mod testing;

pub(crate) use error::Refusal;
pub use error::RestoreError;
pub use named::{FoundImage, ImageStore, NoImages, is_name, name_for, remove_unpacked};
pub(crate) use named::{Named, Node, Wish};
pub use place::in_use;
pub use prepare::{Preparation, admit};
pub use rollback::{LOG, after_kill};
pub use run::{FrontEnd, NotRestored, run};
