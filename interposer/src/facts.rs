//! The functions of the driver, from the headers of CUDA 11.8 to 13.5 (`facts/make.py`).

/// A function that libcuda exports, or will.
#[derive(Debug, PartialEq, Eq)]
pub struct Row {
    /// The exported symbol.
    pub symbol: &'static str,
    /// By which cuGetProcAddress is asked for it.
    pub name: &'static str,
    /// The version of CUDA, as cuda.h counts it, from which cuGetProcAddress answers with it.
    pub since: u32,
    pub stream: Stream,
}

/// What a function takes as the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The one of the whole context; also where no stream is meant.
    Legacy,
    PerThread,
}

/// How an argument is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// Of 32 bits.
    Integer,
    /// Or an integer of 64 bits.
    Pointer,
    Float,
    /// By value, of so many bytes.
    Structure(u16),
}

include!(concat!(env!("OUT_DIR"), "/rows.rs"));

/// The index of the row of an exported symbol.
pub fn of_symbol(symbol: &[u8]) -> Option<usize> {
    ROWS.binary_search_by(|row| row.symbol.as_bytes().cmp(symbol))
        .ok()
}

/// The index of the row that cuGetProcAddress answers with: the newest of this name that is not newer than
/// `version`. A function without a form for the thread's own stream has one for both.
pub fn of_request(name: &[u8], version: u32, stream: Stream) -> Option<usize> {
    let newest = |stream: Stream| {
        let rows = ROWS.iter().enumerate();
        rows.filter(|(_, row)| row.name.as_bytes() == name && row.stream == stream && row.since <= version)
            .max_by_key(|(_, row)| row.since)
            .map(|(index, _)| index)
    };
    match stream {
        Stream::Legacy => newest(stream),
        Stream::PerThread => newest(stream).or_else(|| newest(Stream::Legacy)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(name: &str, version: u32, stream: Stream) -> Option<&'static str> {
        of_request(name.as_bytes(), version, stream).map(|index| ROWS[index].symbol)
    }

    #[test]
    fn every_symbol_is_found_and_no_other() {
        for (index, row) in ROWS.iter().enumerate() {
            assert_eq!(of_symbol(row.symbol.as_bytes()), Some(index), "{row:?}");
        }
        for absent in ["", "cu", "cuInit\0", "cuInit_v2", "cuZZZ", "dlsym"] {
            assert_eq!(of_symbol(absent.as_bytes()), None, "{absent:?}");
        }
    }

    #[test]
    fn a_request_gets_the_newest_that_it_knows() {
        // As driver 580 answers.
        for (name, version, stream, expected) in [
            ("cuMemAlloc", 2000, Stream::Legacy, Some("cuMemAlloc")),
            ("cuMemAlloc", 3019, Stream::Legacy, Some("cuMemAlloc")),
            ("cuMemAlloc", 13000, Stream::Legacy, Some("cuMemAlloc_v2")),
            ("cuMemAlloc", 13000, Stream::PerThread, Some("cuMemAlloc_v2")),
            (
                "cuMemcpyHtoD",
                13000,
                Stream::PerThread,
                Some("cuMemcpyHtoD_v2_ptds"),
            ),
            (
                "cuLaunchKernel",
                7000,
                Stream::PerThread,
                Some("cuLaunchKernel_ptsz"),
            ),
            // Older than the form for the thread's own stream.
            ("cuLaunchKernel", 4000, Stream::PerThread, Some("cuLaunchKernel")),
            (
                "cuCtxSynchronize",
                12090,
                Stream::Legacy,
                Some("cuCtxSynchronize"),
            ),
            (
                "cuCtxSynchronize",
                13000,
                Stream::Legacy,
                Some("cuCtxSynchronize_v2"),
            ),
            ("cuMemCreate", 10010, Stream::Legacy, None),
            ("cuMemAlloc_v2", 13000, Stream::Legacy, None),
            ("", 13000, Stream::Legacy, None),
        ] {
            assert_eq!(symbol(name, version, stream), expected, "{name} {version}");
        }
    }

    #[test]
    fn arguments_are_those_of_the_headers() {
        let arguments = |symbol: &str| ARGUMENTS[of_symbol(symbol.as_bytes()).unwrap()];
        use Argument::{Float, Integer, Pointer, Structure};
        assert_eq!(arguments("cuCtxGetId"), [Pointer, Pointer]);
        assert_eq!(
            arguments("cuIpcOpenMemHandle_v2"),
            [Pointer, Structure(64), Integer]
        );
        assert_eq!(arguments("cuTexRefSetMipmapLevelClamp"), [Pointer, Float, Float]);
        assert_eq!(arguments("cuProfilerStart"), []);
    }
}
