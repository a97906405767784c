//! What the CPUs of this machine can do, as far as programs choose their code by it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Instructions of x86-64 that a CPU may lack and for which programs look, by the kernel's names (Linux,
/// arch/x86/include/asm/cpufeatures.h). Its other names are mitigations, virtualization, what makes the same
/// instruction faster, what one vendor has and compilers do not use, and what a mitigation may hide from one
/// start of the machine to the next (rdseed, rtm).
const X86: &str = "abm adx aes amx_bf16 amx_complex amx_fp16 amx_int8 amx_tile avx avx2 avx512_4fmaps \
                   avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni \
                   avx512_vp2intersect avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f \
                   avx512ifma avx512pf avx512vbmi avx512vl avx_ifma avx_ne_convert avx_vnni avx_vnni_int16 \
                   avx_vnni_int8 bmi1 bmi2 clflushopt clwb cmpccxadd cx16 f16c fma fma4 fsgsbase gfni movbe \
                   movdir64b movdiri ospke pclmulqdq pni popcnt rdpid rdrand rdtscp serialize \
                   sha512 sha_ni sm3 sm4 sse4_1 sse4_2 ssse3 tbm vaes vpclmulqdq waitpkg xgetbv1 xop xsave \
                   xsavec";

/// Names of instructions and states of registers, as the kernel writes them. Empty: not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuFeatures(BTreeSet<String>);

impl CpuFeatures {
    /// Of this machine.
    pub fn here() -> Self {
        Self::read(Path::new("/proc/cpuinfo"))
    }

    /// Of the first CPU in the file: the others can do the same. The kernel takes its time for each of them.
    fn read(cpuinfo: &Path) -> Self {
        let Ok(file) = File::open(cpuinfo) else {
            return Self::default();
        };
        let lines = BufReader::new(file).lines().map_while(Result::ok);
        lines
            .filter_map(|line| Self::of_line(&line))
            .next()
            .unwrap_or_default()
    }

    /// Of the first CPU in lines of another node's /proc/cpuinfo.
    pub fn of(cpuinfo: &str) -> Self {
        let mut lines = cpuinfo.lines();
        lines.find_map(Self::of_line).unwrap_or_default()
    }

    fn of_line(line: &str) -> Option<Self> {
        let (name, words) = line.split_once(':')?;
        let words = words.split_ascii_whitespace();
        match name.trim() {
            "flags" => Some(
                words
                    .filter(|word| X86.split(' ').any(|name| name == *word))
                    .collect(),
            ),
            // arm64: what programs may use, abilities of the kernel, and what a mitigation hides.
            "Features" => Some(
                words
                    .filter(|word| !["cpuid", "evtstrm", "ssbs"].contains(word))
                    .collect(),
            ),
            _ => None,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// What `there` lacks of these; nothing if it is not known what it has.
    pub fn lacking<'a>(&'a self, there: &Self) -> Vec<&'a str> {
        let lacks = |name: &&str| !there.is_empty() && !there.0.contains(*name);
        self.names().filter(lacks).collect()
    }
}

impl<'a> FromIterator<&'a str> for CpuFeatures {
    fn from_iter<I: IntoIterator<Item = &'a str>>(names: I) -> Self {
        Self(names.into_iter().map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> CpuFeatures {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cpuinfo");
        std::fs::write(&file, text).unwrap();
        CpuFeatures::read(&file)
    }

    #[test]
    fn instructions_count_and_other_flags_do_not() {
        let text = "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 retbleed sse4_2 erms\n\n\
                    processor\t: 1\nflags\t\t: fpu avx512f\n";
        assert_eq!(read(text), ["avx2", "sse4_2"].into_iter().collect());
        assert_eq!(CpuFeatures::of(text), ["avx2", "sse4_2"].into_iter().collect());
        let text = "processor\t: 0\nFeatures\t: fp asimd evtstrm cpuid ssbs sve2\n";
        assert_eq!(read(text), ["asimd", "fp", "sve2"].into_iter().collect());
    }

    #[test]
    fn what_is_not_known_lacks_nothing() {
        let of = |names: &[&str]| names.iter().copied().collect::<CpuFeatures>();
        assert_eq!(of(&["avx2", "fma"]).lacking(&of(&["fma", "sse4_2"])), ["avx2"]);
        assert!(of(&["avx2"]).lacking(&of(&["avx2", "fma"])).is_empty());
        assert!(of(&["avx2"]).lacking(&CpuFeatures::default()).is_empty());
        assert!(CpuFeatures::default().lacking(&of(&["avx2"])).is_empty());
        assert_eq!(read("no such line\n"), CpuFeatures::default());
        assert!(CpuFeatures::of("").is_empty());
        assert!(CpuFeatures::read(Path::new("/nonexistent")).is_empty());
    }

    /// On the machines of CI and of users.
    #[test]
    fn this_machine_can_do_something() {
        assert!(!CpuFeatures::here().is_empty());
    }
}
