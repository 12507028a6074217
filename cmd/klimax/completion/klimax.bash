# bash completion for klimax
_klimax() {
    local line words=() word last=$((COMP_CWORD))
    # bash splits words at "=" and ":"; put them together again.
    local i joined=""
    for ((i = 1; i <= last; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == [=:]* || ( $i -gt 1 && ${COMP_WORDS[i - 1]} == *[=:] ) ]] && ((${#words[@]})); then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
    done
    joined=${words[${#words[@]} - 1]}
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            compopt -o filenames 2>/dev/null
            COMPREPLY=($(compgen -f -- "${COMP_WORDS[last]}"))
            return
        fi
        COMPREPLY+=("${line%%$'\t'*}")
    done < <(klimax __complete "${words[@]}" 2>/dev/null)
    # Take off what bash holds for words of their own.
    local cut=${joined%"${COMP_WORDS[last]}"}
    [[ ${COMP_WORDS[last]} == [=:] ]] && cut=$joined
    if [[ -n $cut ]]; then
        COMPREPLY=("${COMPREPLY[@]#"$cut"}")
    fi
    if ((${#COMPREPLY[@]} == 1)) && [[ ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _klimax klimax
