//! What a journal has recorded.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use firn_gpu::CudaProcess;
use firn_gpu::protocol::GpuMemory;
use firn_host::UnlessAbsent;

use super::{Begin, ChildProcess, DirId, FILE, ImageWas, LIMIT, Line, Origin, Outcome, VERSION, boot};
use crate::phase::Phase;
use crate::recording;

/// A transaction, as its journal records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub begin: Begin,
    /// Whose it is; none in journals of earlier versions.
    pub origin: Option<Origin>,
    /// Pid of the shim.
    pub shim: u32,
    /// When the transaction began, in milliseconds since 1970.
    pub begun: u64,
    /// The phase that was entered last.
    pub phase: Option<Phase>,
    /// When that was.
    pub entered: u64,
    /// Every phase that was entered, and when.
    pub entered_at: Vec<(Phase, u64)>,
    /// The driver was called to checkpoint GPU state.
    pub gpu_checkpointing: bool,
    /// What the image directory was; none before it was written to.
    pub image_was: Option<ImageWas>,
    /// Which directory it is; none before it was made, and in journals of earlier versions.
    pub image_id: Option<DirId>,
    /// The second directory of an image whose client may remove the first.
    pub rescue: Option<PathBuf>,
    /// The image is complete.
    pub dumped: bool,
    /// Every CUDA process that was ever seen.
    pub cuda: Vec<CudaProcess>,
    /// Bytes of GPU memory that they had, by GPU.
    pub memory: GpuMemory,
    pub children: Vec<ChildProcess>,
    pub outcome: Option<Outcome>,
    /// Why the container is suspended.
    pub reason: Option<String>,
    /// The journal is of this boot of the host: pids are still valid.
    pub same_boot: bool,
}

impl Record {
    /// The journal in `bundle`; none when no transaction was under way.
    pub fn read(bundle: &Path) -> io::Result<Option<Self>> {
        let mut text = Vec::new();
        let Some(file) = File::open(bundle.join(FILE)).if_present()? else {
            return Ok(None);
        };
        file.take(LIMIT).read_to_end(&mut text)?;
        Ok(Self::parse(&text))
    }

    /// This call works for the transaction, which another process has begun and not ended.
    pub fn adopt(&self) {
        if let Some(origin) = &self.origin {
            recording::adopt(origin, self.begin.op, &self.begin.container);
        }
    }

    /// None without a whole first line: then nothing was begun.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let whole = text.iter().rposition(|byte| *byte == b'\n')?;
        let mut lines = text[..whole]
            .split(|byte| *byte == b'\n')
            .map(serde_json::from_slice)
            .filter_map(Result::ok);
        let Some(Line::Begin {
            version: VERSION,
            boot: of,
            shim,
            at,
            origin,
            begin,
        }) = lines.next()
        else {
            return None;
        };
        let mut record = Self {
            begin,
            origin: Origin::of_text(&origin),
            shim,
            begun: at,
            phase: None,
            entered: at,
            entered_at: Vec::new(),
            gpu_checkpointing: false,
            image_was: None,
            image_id: None,
            rescue: None,
            dumped: false,
            cuda: Vec::new(),
            memory: GpuMemory::new(),
            children: Vec::new(),
            outcome: None,
            reason: None,
            same_boot: !of.is_empty() && of == boot(),
        };
        lines.for_each(|line| record.add(line));
        Some(record)
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Begin { .. } => {}
            Line::Enter { phase, at } => {
                self.phase = Some(phase);
                self.entered = at;
                self.entered_at.push((phase, at));
                self.gpu_checkpointing |= phase == Phase::GpuCheckpoint;
            }
            Line::Leave { phase, ok } => match phase {
                Phase::CriuDump => self.dumped |= ok,
                Phase::Sync => self.dumped &= ok,
                _ => {}
            },
            Line::Image { was, id } => {
                self.image_was = Some(was);
                self.image_id = id;
            }
            Line::Rescue { dir } => self.rescue = Some(dir),
            Line::Memory { gpus } => self.memory = gpus,
            Line::Cuda { processes } => {
                for process in processes {
                    if !self.cuda.iter().any(|known| known.pid == process.pid) {
                        self.cuda.push(process);
                    }
                }
            }
            Line::Child(child) => self.children.push(child),
            Line::End { outcome, reason } => (self.outcome, self.reason) = (Some(outcome), reason),
        }
    }
}
