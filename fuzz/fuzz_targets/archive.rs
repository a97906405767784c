#![no_main]

#[path = "../../cli/src/archive.rs"]
mod archive;
#[path = "../../cli/src/fuzz.rs"]
mod fuzz;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::archive(data));
