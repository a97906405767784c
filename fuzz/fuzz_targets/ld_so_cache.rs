#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_cdi::fuzz::ld_so_cache(data));
