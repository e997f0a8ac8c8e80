//! A sentence to its embedding, by an encoder that `relax-tune export` wrote under the name `encoder`; no Python.
//!
//!     relax-tune export minilm-c.rta --c encoder --name encoder
//!     cmake -S encoder -B build && cmake --build build
//!     rustc -O embed.rs -L build -l static=encoder -l gomp -o embed
//!     ./embed encoder/encoder.weights MODEL/vocab.txt "How does a compiler work?"
//!
//! It prints the numbers of the embedding, scaled to length 1, one a line.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::process::ExitCode;

#[repr(C)]
struct Options {
    weights_file: *const c_char,
    weights: *const c_void,
    weights_bytes: usize,
    workspace_bytes: usize,
}

extern "C" {
    fn encoder_create(model: *mut *mut c_void, options: *const Options) -> c_int;
    fn encoder_output_bytes(
        model: *mut c_void, function: i32, symbols: *const i64, output: i32, bytes: *mut usize,
    ) -> c_int;
    fn encoder_run(
        model: *mut c_void, function: i32, symbols: *const i64, inputs: *const *const c_void, outputs: *const *mut c_void,
    ) -> c_int;
    fn encoder_error(model: *const c_void) -> *const c_char;
    fn encoder_destroy(model: *mut c_void);
}

const MAIN: i32 = 0;

/// An open model; its errors are the sentences of the library.
struct Encoder(*mut c_void);

impl Encoder {
    fn open(weights: &str) -> Result<Encoder, String> {
        let path = CString::new(weights).map_err(|e| e.to_string())?;
        let options = Options { weights_file: path.as_ptr(), weights: std::ptr::null(), weights_bytes: 0, workspace_bytes: 0 };
        let mut model = std::ptr::null_mut();
        let failed = unsafe { encoder_create(&mut model, &options) };
        let encoder = Encoder(model);
        encoder.checked(failed).map(|()| encoder)
    }

    fn checked(&self, failed: c_int) -> Result<(), String> {
        if failed == 0 {
            return Ok(());
        }
        Err(unsafe { CStr::from_ptr(encoder_error(self.0)) }.to_string_lossy().into_owned())
    }

    fn embed(&self, ids: &[i64]) -> Result<Vec<f32>, String> {
        let (symbols, mask) = ([1, ids.len() as i64], vec![1i64; ids.len()]);
        let mut bytes = 0;
        self.checked(unsafe { encoder_output_bytes(self.0, MAIN, symbols.as_ptr(), 0, &mut bytes) })?;
        let mut embedding = vec![0f32; bytes / 4];
        let inputs = [ids.as_ptr().cast(), mask.as_ptr().cast()];
        let outputs = [embedding.as_mut_ptr().cast()];
        self.checked(unsafe { encoder_run(self.0, MAIN, symbols.as_ptr(), inputs.as_ptr(), outputs.as_ptr()) })?;
        Ok(embedding)
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        unsafe { encoder_destroy(self.0) }
    }
}

/// Words of letters and digits, and single marks, in lower case: BERT's words for ASCII text.
fn words_of(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut open = false;
    for c in text.chars() {
        if c.is_whitespace() {
            open = false;
        } else if c.is_ascii_punctuation() {
            words.push(c.to_string());
            open = false;
        } else {
            if !open {
                words.push(String::new());
            }
            words.last_mut().unwrap().extend(c.to_lowercase());
            open = true;
        }
    }
    words
}

/// WordPiece (Schuster and Nakajima 2012): the longest piece of the vocabulary first, and so on with the rest.
fn tokens_of(vocabulary: &HashMap<String, i64>, text: &str) -> Option<Vec<i64>> {
    let mut tokens = vec![*vocabulary.get("[CLS]")?];
    for word in words_of(text) {
        let ends: Vec<usize> = word.char_indices().map(|(i, c)| i + c.len_utf8()).collect();
        let (mut pieces, mut at) = (Vec::new(), 0);
        while at < word.len() {
            let prefix = if at > 0 { "##" } else { "" };
            let found = ends.iter().rev().filter(|end| **end > at).find_map(|end| {
                vocabulary.get(&format!("{prefix}{}", &word[at..*end])).map(|token| (*end, *token))
            });
            match found {
                Some((end, token)) => {
                    pieces.push(token);
                    at = end;
                }
                None => {
                    pieces = vec![*vocabulary.get("[UNK]")?];
                    break;
                }
            }
        }
        tokens.extend(pieces);
    }
    tokens.push(*vocabulary.get("[SEP]")?);
    Some(tokens)
}

fn run(weights: &str, vocabulary: &str, sentence: &str) -> Result<(), String> {
    let encoder = Encoder::open(weights)?;
    let text = std::fs::read_to_string(vocabulary).map_err(|e| format!("{vocabulary}: {e}"))?;
    let known = text.lines().enumerate().map(|(i, line)| (line.to_string(), i as i64)).collect();
    let ids = tokens_of(&known, sentence).ok_or(format!("{vocabulary}: expected a vocabulary of WordPiece, got none"))?;
    let embedding = encoder.embed(&ids)?;
    let length = embedding.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().max(1e-30).sqrt();
    for x in embedding {
        println!("{}", f64::from(x) / length);
    }
    Ok(())
}

fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().collect();
    let [_, weights, vocabulary, sentence] = given.as_slice() else {
        eprintln!("usage: embed WEIGHTS VOCABULARY SENTENCE");
        return ExitCode::from(2);
    };
    match run(weights, vocabulary, sentence) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
