//! The tree of processes in an image, for people.

use std::path::Path;

use super::tasks::{CORE_MAGIC, PSTREE, PSTREE_MAGIC};
use super::{Image, ImageFault, missing, shown};

/// Most processes that are read.
const MOST: usize = 65_536;

/// A process of the image, by its ids in the container.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Process {
    pub pid: u32,
    /// 0: it has no parent in the image.
    pub parent: u32,
    pub threads: usize,
    /// Its name, without control characters.
    pub comm: String,
    /// It had ended, and its parent had not yet asked for its status.
    pub ended: bool,
}

/// All processes, in the order in which the image has them: parents come first.
pub fn processes(image: &Path) -> Result<Vec<Process>, ImageFault> {
    let image = Image::open(image)?;
    let tree = image.read(PSTREE, PSTREE_MAGIC, |message| {
        Ok((
            message.required(1)?,
            message.required(2)?,
            message.numbers(5)?.len(),
        ))
    })?;
    let tree = tree.ok_or_else(|| missing(PSTREE))?;
    if tree.len() > MOST {
        return Err(ImageFault::malformed(PSTREE, "it has too many processes"));
    }
    let process = |(pid, parent, threads)| {
        let name = format!("core-{pid}.img");
        let core = image.read_one(&name, CORE_MAGIC, |message| {
            let task = message.message(3)?;
            let task = task.as_ref();
            let comm = task
                .map(|task| task.text(6))
                .transpose()?
                .flatten()
                .unwrap_or_default();
            let state = task.map(|task| task.number(1)).transpose()?.flatten();
            Ok((shown(comm), state))
        })?;
        let (comm, state) = core.ok_or_else(|| missing(&name))?;
        Ok(Process {
            pid,
            parent,
            threads,
            comm,
            ended: matches!(state, Some(super::tasks::DEAD | super::tasks::ZOMBIE)),
        })
    };
    tree.into_iter().map(process).collect()
}
