#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| firn_image::fuzz::store_index(data));
