//! The processors that a release is made for. One that is not this machine's needs a C compiler, and qemu to
//! start what was built.

use std::fmt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::{check, install_missing, output};
use crate::tools::{cargo, in_path};

/// A processor's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Arch {
    #[value(name = "x86_64")]
    X86,
    #[value(name = "aarch64")]
    Arm,
}

/// The C library that programs are linked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Libc {
    /// Dynamically.
    Gnu,
    /// Statically.
    Musl,
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::X86 => "x86_64",
            Self::Arm => "aarch64",
        })
    }
}

impl Arch {
    pub(super) const ALL: [Self; 2] = [Self::X86, Self::Arm];

    /// Debian's name of it.
    pub(super) fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// This machine's.
    pub(super) fn own() -> Result<Self> {
        let own = std::env::consts::ARCH;
        let known = Self::ALL.into_iter().find(|arch| arch.to_string() == own);
        known.with_context(|| format!("releases are not made on {own}"))
    }

    pub(super) fn is_own(self) -> bool {
        self.to_string() == std::env::consts::ARCH
    }

    pub(super) fn target(self, libc: Libc) -> String {
        let libc = match libc {
            Libc::Gnu => "gnu",
            Libc::Musl => "musl",
        };
        format!("{self}-unknown-linux-{libc}")
    }

    /// Debian's names begin so: the C compiler's, and those of its directories.
    fn gnu(self) -> String {
        format!("{self}-linux-gnu")
    }

    /// Installs what builds for it and starts it here.
    pub(super) fn prepare(self) -> Result<()> {
        if self.is_own() {
            return Ok(());
        }
        let (gnu, debian) = (self.gnu(), self.debian());
        let needed = [
            (format!("{gnu}-gcc"), format!("gcc-{}", gnu.replace('_', "-"))),
            (
                format!("/usr/{gnu}/include/stdio.h"),
                format!("libc6-dev-{debian}-cross"),
            ),
            (self.emulator(), "qemu-user-static".to_owned()),
        ];
        let needed: Vec<_> = needed
            .iter()
            .map(|(file, package)| (&**file, &**package))
            .collect();
        install_missing(&needed)
    }

    fn emulator(self) -> String {
        format!("qemu-{self}-static")
    }

    /// `cargo` with the linker and the C compiler for the target.
    pub(super) fn cargo(self, libc: Libc) -> Command {
        let mut cargo = cargo();
        if !self.is_own() {
            let target = self.target(libc).replace('-', "_");
            let gcc = format!("{}-gcc", self.gnu());
            let linker = format!("CARGO_TARGET_{}_LINKER", target.to_uppercase());
            cargo.env(linker, &gcc).env(format!("CC_{target}"), &gcc);
        }
        cargo
    }

    /// A command that runs a program for this processor.
    pub(super) fn run(self, program: &Path) -> Command {
        if self.is_own() {
            return Command::new(program);
        }
        let emulator = in_path(&self.emulator()).unwrap_or_else(|| self.emulator().into());
        let mut command = Command::new(emulator);
        command.arg("-L").arg(format!("/usr/{}", self.gnu())).arg(program);
        command
    }

    /// Fails if the file is for another processor.
    pub(super) fn check(self, file: &Path) -> Result<()> {
        let machine = match self {
            Self::X86 => "X86-64",
            Self::Arm => "AArch64",
        };
        let header = output(Command::new("readelf").arg("--file-header").arg(file))?;
        let is_for_it = header
            .lines()
            .any(|line| line.contains("Machine:") && line.contains(machine));
        anyhow::ensure!(is_for_it, "{} is not for {self}", file.display());
        Ok(())
    }

    /// Adds the target to the toolchain.
    pub(super) fn add_target(self, libc: Libc, workspace: &Path) -> Result<()> {
        let target = self.target(libc);
        let add = ["target", "add", &target];
        check(Command::new("rustup").args(add).current_dir(workspace))
            .with_context(|| format!("{self} needs the target {target}"))
    }
}
